// FlashInfer's FlashAttention 3 of prompts, as this project uses it: causal, and for one model.
//
// paged.cu and ragged.cu have one kernel each. run_paged.cu and run_ragged.cu start them, and are
// compiled beside them.
//
// Given to the compiler: PROMPT_TYPE, PROMPT_HEAD_DIM, PROMPT_HAS_WINDOW, PROMPT_HAS_SOFTCAP.
#pragma once

// FlashInfer's own header of this name includes CUTLASS's GEMMs, tests and tools.
#define FLASHINFER_CUTLASS_UTILS_CUH_

#include <flashinfer/attention/hopper/prefill_sm90.cuh>

namespace prompts {

// The members that FlashInfer's variants of attention look for.
struct AdditionalParams {
  double logits_soft_cap;
  double sm_scale;
};

using Element = PROMPT_TYPE;
constexpr int kHeadDim = PROMPT_HEAD_DIM;
constexpr bool kHasWindow = PROMPT_HAS_WINDOW;
constexpr int kStages = 2;
constexpr bool kCausal = true;

using Variant = flashinfer::DefaultAttention<PROMPT_HAS_SOFTCAP>;
using Scheduler = flashinfer::BatchPrefillPersistentTileScheduler<int32_t>;

template <bool kUsesTma, int kTileQ, int kTileKV>
using Traits = flashinfer::AttentionKernelTraits<kUsesTma, kHeadDim, kHeadDim, kTileQ, kTileKV,
                                                 kStages, Element, Element, Element, int32_t,
                                                 Variant>;

// The sizes of tiles are those that FlashInfer chooses; its plan counts with those of queries.
constexpr int kTileQ = kHeadDim == 64 ? 192 : 128;
constexpr int kPagedTileKV = kHeadDim == 256 ? 32 : 96;
constexpr int kRaggedTileKV = kHeadDim == 256 ? 64 : 128;

struct Paged {
  using Traits = Traits<false, kTileQ, kPagedTileKV>;
  using Mainloop = flashinfer::SparseCollectiveMainloop<AdditionalParams, Traits, kCausal>;
  using Epilogue = flashinfer::CollectiveEpilogue<Traits>;
};

struct Ragged {
  using Traits = Traits<true, kTileQ, kRaggedTileKV>;
  using Mainloop = flashinfer::CollectiveMainloop<AdditionalParams, Traits, kCausal>;
  using Epilogue = flashinfer::CollectiveEpilogue<Traits>;
};

static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256,
              "FlashAttention 3 takes heads of 64, 128 or 256 numbers");

}  // namespace prompts

// The kernel of a source: the only one of its cubin.
#define PROMPT_KERNEL(Kind)                                                                     \
  template __global__ void flashinfer::PrefillWithKVCacheKernel<                                \
      Kind::Mainloop, Kind::Epilogue, Kind::Traits, prompts::kHasWindow, prompts::kCausal,      \
      prompts::Scheduler>(CUTE_GRID_CONSTANT Kind::Mainloop::Params const,                      \
                          CUTE_GRID_CONSTANT Kind::Epilogue::Params const,                      \
                          CUTE_GRID_CONSTANT prompts::Scheduler::Params const)
