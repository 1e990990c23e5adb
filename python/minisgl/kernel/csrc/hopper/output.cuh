// How the output of a tile of queries comes to global memory.
//
// FlashInfer's kernel takes this class in the place of its own (hopper/epilogue.cuh), for the reason
// in loads.cuh. It gives no sums of scores.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "loads.cuh"

namespace prompts {

// A warp has 16 rows. Their numbers go through shared memory, so that threads write whole chunks.
template <class Traits>
struct Output {
  using Params = OutputParams;
  static constexpr int kRowChunks = kHeadDim / kChunk;
  static constexpr int kWarpRows = 16;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params&) {}

  // fragment: float, of each thread, as wgmma leaves them: of each chunk of 8 columns two numbers of
  // row lane / 4 and two of the row 8 below.
  template <class Fragment, class Sums, class SharedStorage, class TiledMma, class BlockCoord>
  CUTLASS_DEVICE void store(const Params& params, const Fragment& fragment, const Sums&,
                            SharedStorage& shared, TiledMma, int thread, const BlockCoord& coord) {
    static_assert(decltype(cute::size(fragment))::value == kWarpRows * kHeadDim / 32);
    const int first_row = thread / 32 * kWarpRows;
    const int lane = thread % 32;
    Element* rows = shared.smem_o.data() + first_row * kHeadDim;
    const float* x = fragment.data();

    // The output lies where the values did.
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

  // Of queries that see no keys.
  template <class SharedStorage, class BlockCoord>
  CUTLASS_DEVICE void store_zero(const Params& params, SharedStorage&, int thread,
                                 const BlockCoord& coord) {
    for (int i = thread; i < kTileQ * kRowChunks; i += Traits::NUM_MMA_THREADS) {
      write(params, coord, i / kRowChunks, i % kRowChunks, make_uint4(0, 0, 0, 0));
    }
  }

 private:
  // Chunks of a column of rows are swapped, so that no two threads wait for one bank.
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
    if (query >= num_queries) return;
    Element* o = static_cast<Element*>(params.o) + head * params.head_stride;
    o += (first_query + query) * params.token_stride + chunk * kChunk;
    *reinterpret_cast<uint4*>(o) = numbers;
  }
};

}  // namespace prompts
