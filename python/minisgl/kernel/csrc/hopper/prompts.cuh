// FlashInfer's FlashAttention 3 of prompts, as this project uses it: causal, and for one model.
//
// paged.cu and ragged.cu have one kernel each; launch.cu starts them, and is compiled beside them.
// loads.cuh and output.cuh are ours. Products and softmax are FlashInfer's.
#pragma once

// FlashInfer's own header of this name includes CUTLASS's GEMMs, tests and tools.
#define FLASHINFER_CUTLASS_UTILS_CUH_

#include "loads.cuh"
#include "output.cuh"
#include "sizes.h"

namespace prompts {

constexpr bool kHasWindow = PROMPT_HAS_WINDOW;
constexpr bool kCausal = true;

using Variant = flashinfer::DefaultAttention<PROMPT_HAS_SOFTCAP>;
using Scheduler = flashinfer::BatchPrefillPersistentTileScheduler<int32_t>;

template <bool kUsesTma, int kTileKV>
using Traits = flashinfer::AttentionKernelTraits<kUsesTma, kHeadDim, kHeadDim, kTileQ, kTileKV,
                                                 kStages, Element, Element, Element, int32_t,
                                                 Variant>;

struct Paged {
  using Traits = Traits<false, kPagedTileKV>;
  using Loads = PagedLoads<Traits>;
};

struct Ragged {
  using Traits = Traits<true, kRaggedTileKV>;
  using Loads = RaggedLoads<Traits>;
};

}  // namespace prompts

// The kernel of a source: the only one of its cubin.
#define PROMPT_KERNEL(Kind)                                                                      \
  static_assert(sizeof(Kind::Traits::SharedStorage) <= prompts::shared_bytes(Kind::Traits::CTA_KV)); \
  static_assert(Kind::Traits::NUM_THREADS == prompts::kThreads);                                 \
  template __global__ void flashinfer::PrefillWithKVCacheKernel<                                 \
      Kind::Loads, prompts::Output<Kind::Traits>, Kind::Traits, prompts::kHasWindow,             \
      prompts::kCausal, prompts::Scheduler>(CUTE_GRID_CONSTANT Kind::Loads::Params const,        \
                                            CUTE_GRID_CONSTANT prompts::OutputParams const,      \
                                            CUTE_GRID_CONSTANT prompts::Scheduler::Params const)
