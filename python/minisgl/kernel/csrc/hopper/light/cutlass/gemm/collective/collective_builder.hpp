// The parts of CUTLASS's header of this name that FlashInfer's kernels of prompts use. The original
// includes all GEMMs of all GPUs, and takes a compiler longer than the kernels do.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/memory.h>
#include <cutlass/arch/memory_sm80.h>

#include <cutlass/gemm/collective/builders/sm90_common.inl>
