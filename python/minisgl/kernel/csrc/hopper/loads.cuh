// Loads queries, keys and values to shared memory.
//
// FlashInfer's kernel takes these classes in place of its own (hopper/mainloop.cuh and
// hopper/sparse_mainloop.cuh), which do the same in the same order. Its own describe each place by
// CuTe's layouts, whose templates take a compiler longer than the rest of the kernel.
#pragma once

#include <type_traits>

#include <flashinfer/attention/hopper/prefill_sm90.cuh>

#include "sizes.h"

namespace prompts {

using cutlass::arch::NamedBarrier;
using Element = PROMPT_TYPE;
constexpr int kChunk = 8;  // numbers in 16 bytes

// Where a chunk of a row is in a tile. Columns follow one another. In a column, the chunks of a row
// are swizzled by the row's number, as wgmma and the tensor maps of launch.cu swizzle them.
template <int kRows>
CUTLASS_DEVICE int place_of(int row, int chunk) {
  constexpr int kChunks = kColumn / kChunk;
  return (chunk / kChunks * kRows + row) * kColumn + (chunk ^ row) % kChunks * kChunk;
}

// The common part of both kinds of loads. The names are those that FlashInfer's kernel uses.
template <class Traits, class Params_>
struct Loads {
  using Params = Params_;
  using MainloopPipeline = typename Traits::MainloopPipeline;
  using PipelineState = typename MainloopPipeline::PipelineState;
  using WarpScheduler = flashinfer::WarpScheduler<Traits, (kHeadDim <= 128)>;
  static constexpr int kTileKV = Traits::CTA_KV;
  static constexpr int kTileNumbers = kTileKV * kHeadDim;

  CUTLASS_DEVICE int get_num_kv_tiles(const Params&, int q_tile, int num_queries, int num_keys) {
    const int num_seen_keys = (q_tile + 1) * kTileQ + num_keys - num_queries;
    return (min(num_keys, num_seen_keys) + kTileKV - 1) / kTileKV;
  }

  template <bool kHasWindow>
  CUTLASS_DEVICE int first_kv_tile(const Params& params, int q_tile, int num_queries,
                                   int num_keys) {
    if constexpr (kHasWindow) {
      return flashinfer::get_swa_begin_kv_tile_idx<kTileQ, kTileKV>(params.window_left, q_tile,
                                                                    num_queries, num_keys);
    } else {
      return 0;
    }
  }

  // To be called by one thread.
  template <int kRows>
  CUTLASS_DEVICE void load_rows(const CUtensorMap& heads, uint64_t* barrier, Element* tile,
                                int token, int head) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
#pragma unroll
    for (int number = 0; number < kHeadDim; number += kColumn) {
      cute::SM90_TMA_LOAD_3D::copy(&heads, barrier, kHint, tile + number * kRows, number, token,
                                   head);
    }
  }

  // To be called by one thread.
  template <class SharedStorage>
  CUTLASS_DEVICE void load_queries(const Params& params, SharedStorage& shared, int token,
                                   int head) {
    auto& barrier = shared.barrier_Q;
    barrier.arrive_and_expect_tx(2 * kTileQ * kHeadDim);
    load_rows<kTileQ>(params.q, reinterpret_cast<uint64_t*>(&barrier), shared.smem_q.data(), token,
                      head);
  }

  // Waits for the kernel before this one. All that is read before is the work, which was copied to
  // the device before that one began. The kernel after this one may not start early: it would take
  // the processors that prompts leave idle, which decodes use.
  CUTLASS_DEVICE static void wait_for_inputs() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }

  // Waits until the threads that multiply no longer need the queries of the previous tile.
  CUTLASS_DEVICE void wait_for_room_for_queries() {
    NamedBarrier::sync(Traits::NUM_MMA_THREADS + Traits::NUM_PRODUCER_THREADS,
                       static_cast<int>(flashinfer::NamedBarriers::kQueryEmpty));
  }
};

// Loads for prompts whose keys are all in the batch. One warp calls it, and one of its threads
// loads.
template <class Traits>
struct RaggedLoads : Loads<Traits, RaggedParams> {
  using Base = Loads<Traits, RaggedParams>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using Base::kTileKV;
  static constexpr bool USE_TMA_LOAD_KV = true;
  static constexpr uint32_t TmaTransactionBytesK = 2 * Base::kTileNumbers;
  static constexpr uint32_t TmaTransactionBytesV = 2 * Base::kTileNumbers;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    cute::prefetch_tma_descriptor(&params.q);
    cute::prefetch_tma_descriptor(&params.k);
    cute::prefetch_tma_descriptor(&params.v);
  }

  template <bool kHasWindow, class BlockCoord, class Scheduler, class SharedStorage>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline keys, MainloopPipeline values,
                           PipelineState& key_stage, PipelineState& value_stage,
                           SharedStorage& shared, Scheduler&, const typename Scheduler::Params&,
                           typename Scheduler::WorkTileInfo&, const BlockCoord& coord,
                           int work_index) {
    if (work_index == 0) this->wait_for_inputs();
    auto [q_tile, head, kv_head, first_query, first_key, num_queries, num_keys, prompt] = coord;
    auto load_tile = [&, first = first_key, kv_head = kv_head](
                         MainloopPipeline& pipeline, PipelineState& stage,
                         const CUtensorMap& heads, Element* tiles, int tile) {
      pipeline.producer_acquire(stage);
      this->template load_rows<kTileKV>(heads, pipeline.producer_get_barrier(stage),
                                        tiles + stage.index() * Base::kTileNumbers,
                                        first + tile * kTileKV, kv_head);
      ++stage;
    };
    auto load_keys = [&](int tile) {
      load_tile(keys, key_stage, params.k, shared.smem_k.data(), tile);
    };
    auto load_values = [&](int tile) {
      load_tile(values, value_stage, params.v, shared.smem_v.data(), tile);
    };
    const bool is_leader = cute::elect_one_sync();
    int tile = this->get_num_kv_tiles(params, q_tile, num_queries, num_keys) - 1;
    const int first_tile =
        this->template first_kv_tile<kHasWindow>(params, q_tile, num_queries, num_keys);

    if (is_leader) load_keys(tile);
    this->wait_for_room_for_queries();
    if (is_leader) this->load_queries(params, shared, first_query + q_tile * kTileQ, head);
    shared.barrier_O.wait((work_index + 1) % 2);  // values are loaded to where the output is
    if (is_leader) {
#pragma unroll 2
      for (; tile > first_tile; --tile) {
        load_keys(tile - 1);
        load_values(tile);
      }
      load_values(tile);
    }
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline keys, MainloopPipeline values,
                                PipelineState& key_stage, PipelineState& value_stage) {
    if (threadIdx.x / 32 == 0 && cute::elect_one_sync()) {
      keys.producer_tail(key_stage);
      values.producer_tail(value_stage);
    }
  }
};

// Loads for prompts some or all of whose keys are in the pages of the pool. Four warps call it.
// kRowThreads threads load a row, a chunk each, and take every kRowStep-th row.
template <class Traits>
struct PagedLoads : Loads<Traits, PagedParams> {
  using Base = Loads<Traits, PagedParams>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using Base::kTileKV;
  static constexpr bool USE_TMA_LOAD_KV = false;
  static constexpr int kRowThreads = kHeadDim / kChunk;
  static constexpr int kRowStep = Traits::NUM_PRODUCER_THREADS / kRowThreads;
  static constexpr int kRowsEach = kTileKV / kRowStep;
  static_assert(kTileKV % kRowStep == 0 && kRowsEach <= kRowThreads && kRowThreads <= 32);

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    cute::prefetch_tma_descriptor(&params.q);
  }

  template <bool kHasWindow, class BlockCoord, class Scheduler, class SharedStorage>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline keys, MainloopPipeline values,
                           PipelineState& key_stage, PipelineState& value_stage,
                           SharedStorage& shared, Scheduler&, const typename Scheduler::Params&,
                           typename Scheduler::WorkTileInfo&, const BlockCoord& coord,
                           int work_index) {
    if (work_index == 0) this->wait_for_inputs();
    auto [q_tile, head, kv_head, first_query, first_page, num_queries, num_keys, prompt] = coord;
    const int first_row = threadIdx.x / kRowThreads;
    const int chunk = threadIdx.x % kRowThreads;
    const int64_t in_row = kv_head * params.head_stride + chunk * kChunk;
    const Element* k = static_cast<const Element*>(params.k) + in_row;
    const Element* v = static_cast<const Element*>(params.v) + in_row;
    const int32_t* pages = params.pages + first_page;
    // Each thread looks up one of its rows, and shuffles share the results among the threads of a
    // row. For a row after the last key, the last key's row is looked up, but zeros are stored.
    const int own_row = first_row + min(chunk, kRowsEach - 1) * kRowStep;
    const int last_key = num_keys - 1;
    auto find_row = [&](int tile) -> int64_t {
      const int key = min(tile * kTileKV + own_row, last_key);
      uint32_t page;
      uint32_t entry;
      params.page_size.divmod(key, page, entry);
      return pages[page] * params.page_stride + entry * params.token_stride;
    };
    auto load_tile = [&, num_keys = num_keys](MainloopPipeline& pipeline, PipelineState& stage,
                                              const Element* heads, Element* tiles, int64_t found,
                                              int tile, auto is_last) {
      pipeline.producer_acquire(stage);
      Element* to = tiles + stage.index() * Base::kTileNumbers;
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const int row = first_row + i * kRowStep;
        const int64_t at = __shfl_sync(~0u, found, first_row * kRowThreads + i);
        const bool is_there = !is_last || tile * kTileKV + row < num_keys;
        cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(
            to + place_of<kTileKV>(row, chunk), heads + at, is_there);
      }
      pipeline.producer_commit(stage, cutlass::arch::cpasync_barrier_arrive);
      ++stage;
    };
    auto load_keys = [&](int64_t found, int tile, auto is_last) {
      load_tile(keys, key_stage, k, shared.smem_k.data(), found, tile, is_last);
    };
    auto load_values = [&](int64_t found, int tile, auto is_last) {
      load_tile(values, value_stage, v, shared.smem_v.data(), found, tile, is_last);
    };
    const std::true_type last;
    const std::false_type not_last;
    int tile = this->get_num_kv_tiles(params, q_tile, num_queries, num_keys) - 1;
    const int first_tile =
        this->template first_kv_tile<kHasWindow>(params, q_tile, num_queries, num_keys);

    int64_t found = find_row(tile);
    load_keys(found, tile, last);
    this->wait_for_room_for_queries();
    // The compiler does not see that this is the same for all tiles of queries. Otherwise it would
    // generate the loops below twice.
    if (cutlass::canonical_warp_idx_sync() == 0 && cute::elect_one_sync()) {
      this->load_queries(params, shared, first_query + q_tile * kTileQ, head);
    }
    shared.barrier_O.wait((work_index + 1) % 2);  // values are loaded to where the output is
    if (tile <= first_tile) {
      load_values(found, tile, last);
      return;
    }
    int64_t found_before = find_row(tile - 1);
    load_keys(found_before, tile - 1, not_last);
    load_values(found, tile, last);
#pragma unroll 2
    for (--tile; tile > first_tile; --tile) {
      found = found_before;
      found_before = find_row(tile - 1);
      load_keys(found_before, tile - 1, not_last);
      load_values(found, tile, not_last);
    }
    load_values(found_before, tile, not_last);
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline keys, MainloopPipeline values,
                                PipelineState& key_stage, PipelineState& value_stage) {
    keys.producer_tail(key_stage);
    values.producer_tail(value_stage);
  }
};

}  // namespace prompts
