// Stores the output of a tile of queries to global memory.
//
// FlashInfer's kernel takes this class in place of its own (hopper/epilogue.cuh), for the reason in
// loads.cuh. A tile may be cut into parts of its keys; the last part to be finished merges them.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "loads.cuh"

namespace prompts {

// A warp has 16 rows. They go through shared memory, so that threads write whole chunks.
template <class Traits>
struct Output {
  using Params = OutputParams;
  static constexpr int kRowChunks = kHeadDim / kChunk;
  static constexpr int kWarpRows = 16;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params&) {}

  // fragment: the accumulators of a thread, floats, as wgmma leaves them: for each chunk of 8
  // columns, two numbers of row lane / 4 and two of the row 8 below.
  // logs: the logarithms of the sums of weights of these two rows.
  template <class Fragment, class Logs, class SharedStorage, class TiledMma, class BlockCoord>
  CUTLASS_DEVICE void store(const Params& params, const Fragment& fragment, const Logs& logs,
                            SharedStorage& shared, TiledMma, int thread, const BlockCoord& coord) {
    static_assert(decltype(cute::size(fragment))::value == kWarpRows * kHeadDim / 32);
    if (cute::get<7>(coord) >= 0) return store_part(params, fragment, logs, shared, thread, coord);
    const int first_row = thread / 32 * kWarpRows;
    const int lane = thread % 32;
    Element* rows = shared.smem_o.data() + first_row * kHeadDim;
    const float* x = fragment.data();

    // The output is put where the values are, so all threads must have read these.
    NamedBarrier::sync(Traits::NUM_MMA_THREADS,
                       static_cast<int>(flashinfer::NamedBarriers::kValueEmpty));
#pragma unroll
    for (int chunk = 0; chunk < kRowChunks; chunk += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = rounded(x + 4 * chunk + 2 * i);
      Element* to = rows + place_in_warp(lane % kWarpRows, chunk + lane / kWarpRows);
      cute::SM90_U32x4_STSM_N::copy(pairs[0], pairs[1], pairs[2], pairs[3],
                                    *reinterpret_cast<cute::uint128_t*>(to));
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < kWarpRows * kRowChunks; i += 32) {
      const int row = i / kRowChunks;
      const int chunk = i % kRowChunks;
      const uint4 numbers = *reinterpret_cast<const uint4*>(rows + place_in_warp(row, chunk));
      write(params, coord, first_row + row, chunk, numbers);
    }
    // From here on values may be loaded there.
    cutlass::arch::fence_view_async_shared();
    NamedBarrier::sync(Traits::NUM_MMA_THREADS,
                       cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
  }

  CUTLASS_DEVICE void store_tail() {}

  // Stores zeros for queries that see no keys.
  template <class SharedStorage, class BlockCoord>
  CUTLASS_DEVICE void store_zero(const Params& params, SharedStorage&, int thread,
                                 const BlockCoord& coord) {
    Loads<Traits, PagedParams>::wait_for_inputs();  // nothing is loaded, which would have waited
    for (int i = thread; i < kTileQ * kRowChunks; i += Traits::NUM_MMA_THREADS) {
      write(params, coord, i / kRowChunks, i % kRowChunks, make_uint4(0, 0, 0, 0));
    }
  }

 private:
  template <class Fragment, class Logs, class SharedStorage, class BlockCoord>
  CUTLASS_DEVICE static void store_part(const Params& params, const Fragment& fragment,
                                        const Logs& logs, SharedStorage& shared, int thread,
                                        const BlockCoord& coord) {
    auto [q_tile, head, kv_head, first_query, first_key, num_queries, num_keys, part] = coord;
    const Parts& parts = params.parts;
    const Part tile = parts.parts[part];
    const int row = thread / 32 * kWarpRows + thread % 32 / 4;
    const int lane = thread % 4;
    const float* x = fragment.data();
    float* to = parts.outputs + (int64_t(part) * kTileQ + row) * kHeadDim + 2 * lane;
#pragma unroll
    for (int chunk = 0; chunk < kRowChunks; ++chunk) {
      const float* pairs = x + 4 * chunk;
      *reinterpret_cast<float2*>(to + kChunk * chunk) = {pairs[0], pairs[1]};
      *reinterpret_cast<float2*>(to + kChunk * (chunk + kHeadDim)) = {pairs[2], pairs[3]};
    }
    if (lane == 0) {
      parts.logs[part * kTileQ + row] = logs(0);
      parts.logs[part * kTileQ + row + 8] = logs(1);
    }

    // Wait until all threads have written their part, and have read the values: the flag is put
    // where the values are.
    __threadfence();
    NamedBarrier::sync(Traits::NUM_MMA_THREADS,
                       static_cast<int>(flashinfer::NamedBarriers::kValueEmpty));
    auto& is_last = *reinterpret_cast<int*>(shared.smem_o.data());
    if (thread == 0) {
      int* num_done = parts.num_done + tile.first;
      is_last = atomicAdd(num_done, 1) + 1 == tile.num;
      if (is_last) *num_done = 0;
    }
    NamedBarrier::sync(Traits::NUM_MMA_THREADS,
                       static_cast<int>(flashinfer::NamedBarriers::kValueEmpty));
    if (is_last) {
      __threadfence();
      join(params, tile, head, first_query + q_tile * kTileQ, thread);
    }
    cutlass::arch::fence_view_async_shared();
    NamedBarrier::sync(Traits::NUM_MMA_THREADS,
                       cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
  }

  // Merges the parts of a tile. Threads take chunks of rows in turn.
  CUTLASS_DEVICE static void join(const Params& params, const Part& tile, int head, int first_query,
                                  int thread) {
    const Parts& parts = params.parts;
    for (int i = thread; i < tile.num_queries * kRowChunks; i += Traits::NUM_MMA_THREADS) {
      const int row = i / kRowChunks;
      const int chunk = i % kRowChunks;
      float most = -INFINITY;
      for (int part = tile.first; part < tile.first + tile.num; ++part)
        most = fmaxf(most, __ldcg(parts.logs + part * kTileQ + row));
      float total = 0;
      float sum[kChunk] = {};
      for (int part = tile.first; part < tile.first + tile.num; ++part) {
        const int64_t at = int64_t(part) * kTileQ + row;
        const float weight = exp2f(__ldcg(parts.logs + at) - most);
        const float* from = parts.outputs + at * kHeadDim + chunk * kChunk;
        const float4 low = __ldcg(reinterpret_cast<const float4*>(from));
        const float4 high = __ldcg(reinterpret_cast<const float4*>(from) + 1);
        const float numbers[kChunk] = {low.x,  low.y,  low.z,  low.w,
                                       high.x, high.y, high.z, high.w};
        total += weight;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) sum[j] += weight * numbers[j];
      }
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sum[j] /= total;
      const uint4 numbers = {rounded(sum), rounded(sum + 2), rounded(sum + 4), rounded(sum + 6)};
      write_chunk(params, first_query + row, head, chunk, numbers);
    }
  }

  // Chunks are swizzled by the row's number, to avoid bank conflicts.
  CUTLASS_DEVICE static int place_in_warp(int row, int chunk) {
    return row * kHeadDim + (chunk ^ row % 8) * kChunk;
  }

  CUTLASS_DEVICE static uint32_t rounded(const float* pair) {
    cutlass::NumericArrayConverter<Element, float, 2> convert;
    const auto numbers = convert(*reinterpret_cast<const cutlass::Array<float, 2>*>(pair));
    return reinterpret_cast<const uint32_t&>(numbers);
  }

  template <class BlockCoord>
  CUTLASS_DEVICE static void write(const Params& params, const BlockCoord& coord, int row,
                                   int chunk, const uint4& numbers) {
    auto [q_tile, head, kv_head, first_query, first_key, num_queries, num_keys, prompt] = coord;
    const int query = q_tile * kTileQ + row;
    if (query < num_queries) write_chunk(params, first_query + query, head, chunk, numbers);
  }

  CUTLASS_DEVICE static void write_chunk(const Params& params, int token, int head, int chunk,
                                         const uint4& numbers) {
    Element* o = static_cast<Element*>(params.o) + head * params.head_stride;
    o += token * params.token_stride + chunk * kChunk;
    *reinterpret_cast<uint4*>(o) = numbers;
  }
};

}  // namespace prompts
