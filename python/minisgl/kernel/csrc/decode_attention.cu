// Attention of many single queries over paged contexts: all warps read equally many tokens.
//
// `plan_decode` cuts the contexts into ranges, on the device, once per step; `attend_ranges` runs
// once per layer. The work of a warp on a range is in decode_ranges.cuh. The contract is in
// decode_attention.py.
//
// Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, Q positions
// of a page, R rows of the tables, X a selection out of another dimension, Z entries of a flat
// list.

#include <cstdint>

#include "decode_ranges.cuh"
#include "launch.cuh"

namespace {

constexpr int kPlanThreads = 1024;
constexpr int kFewTiles = 16;  // by which the longest context may exceed twice the mean

__global__ void __launch_bounds__(kPlanThreads)
    plan_ranges(const int* position, const int* row, const int* num_shared_tokens, int page_size,
                int num_ranges, int least_tiles, int most_of_cluster, Plan plan) {
  __shared__ int sum_of_warps[kPlanThreads / 32], before, most;
  // The next kernel may not start early: the kernels that attend read this plan before they wait.
  wait_for_inputs();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_requests = plan.num_requests;
  if (threadIdx.x == 0) before = most = 0;
  __syncthreads();
  for (int first = 0; first < num_requests; first += kPlanThreads) {
    int b = first + threadIdx.x;
    int num_shared = b < num_requests && num_shared_tokens ? num_shared_tokens[b] : 0;
    int length = b < num_requests ? position[b] + 1 - num_shared : 0;
    int tiles = (length + kTile - 1) / kTile, sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) sum_of_warps[warp] = sum;
    atomicMax(&most, tiles);
    __syncthreads();
    int total = before;
    for (int w = 0; w < warp; ++w) total += sum_of_warps[w];
    if (b < num_requests)
      *plan.request(b) = {total + sum - tiles, length, row[b], num_shared / page_size};
    __syncthreads();
    if (threadIdx.x == kPlanThreads - 1) before = total + sum;
    __syncthreads();
  }
  // One warp merges the splits of a context. To merge one takes about half as long as to read a
  // tile (an estimate). So the longest context is read and merged soonest with splits of this many
  // tiles.
  int best_of_longest = static_cast<int>(sqrtf(static_cast<float>(most) / 2));
  int size = max(max((before + num_ranges - 1) / num_ranges, least_tiles), best_of_longest);
  bool is_even = most * num_requests <= 2 * before + kFewTiles * num_requests;
  if (threadIdx.x == 0)
    *plan.division() = {size, before, is_even && most <= most_of_cluster, 0};
  for (int b = threadIdx.x; b < num_requests; b += kPlanThreads) {
    Request request = *plan.request(b);
    int begin = request.first_tile, end = begin + request.num_tiles();
    for (int range = (begin + size - 1) / size; range * size < end; ++range)
      *plan.start_of(range) = {b, range * size - begin, {}, request};
  }
  __threadfence();
}

template <int kWidth, bool kHasPrefix>
__global__ void __launch_bounds__(32, 8) attend_ranges(const Inputs in) {
  attend_range<kWidth, kHasPrefix>(in, blockIdx.x);
}

void launch_ranges(const Inputs& in, TensorView q_BNH, int64_t num_ranges, bool starts_early) {
  bool has_prefix = in.prefix.places != nullptr;
  auto kernel = has_prefix ? attend_ranges<64, true> : attend_ranges<64, false>;
  if (q_BNH.size(2) == 128)
    kernel = has_prefix ? attend_ranges<128, true> : attend_ranges<128, false>;
  int num_blocks = static_cast<int>(num_ranges) * in.num_kv_heads;
  Start start{starts_early};
  start.large_cache = true;
  launch(start, q_BNH.device(), num_blocks, 32, kernel, in);
}

}  // namespace

// A position of -1 stands for a missing request. Only missing ones follow it, and nothing is
// written for them.
//
// num_shared_Z: for each context, the number of leading tokens, in whole pages, that are attended
// to elsewhere; empty if there are none.
// most_of_cluster: the most tiles of a context that suits clusters. In addition, no context may be
// longer than twice the mean plus kFewTiles tiles.
void plan_decode(TensorView position_B, TensorView row_B, TensorView num_shared_Z,
                 int64_t page_size, int64_t num_ranges, int64_t least_tiles,
                 int64_t most_of_cluster, TensorView plan_Z) {
  int num_requests = static_cast<int>(position_B.size(0));
  auto num_shared = num_shared_Z.size(0) ? data_of<const int>(num_shared_Z) : nullptr;
  launch(position_B.device(), 1, kPlanThreads, plan_ranges, data_of<const int>(position_B),
         data_of<const int>(row_B), num_shared, static_cast<int>(page_size),
         static_cast<int>(num_ranges), static_cast<int>(least_tiles),
         static_cast<int>(most_of_cluster), Plan{data_of<int>(plan_Z), num_requests});
}

void attend_ranges_of(TensorView q_BNH, TensorView k_PQKH, TensorView v_PQKH,
                      TensorView page_table_RP, TensorView plan_Z, int64_t num_ranges,
                      TensorView part_Z, TensorView top_Z, TensorView num_done_Z, TensorView o_BNH,
                      double scale, bool starts_early) {
  Inputs in = inputs_of(q_BNH, k_PQKH, v_PQKH, page_table_RP, plan_Z, part_Z, top_Z, num_done_Z,
                        o_BNH, scale);
  launch_ranges(in, q_BNH, num_ranges, starts_early);
}

// The last four arguments are the results for shared prefixes, as in `SharedPrefix`.
void attend_suffixes_of(TensorView q_BNH, TensorView k_PQKH, TensorView v_PQKH,
                        TensorView page_table_RP, TensorView plan_Z, int64_t num_ranges,
                        TensorView part_Z, TensorView top_Z, TensorView num_done_Z,
                        TensorView o_BNH, double scale, bool starts_early,
                        TensorView prefix_output_KZH, TensorView prefix_top_KZ,
                        TensorView prefix_sum_KZ, TensorView place_BX) {
  Inputs in = inputs_of(q_BNH, k_PQKH, v_PQKH, page_table_RP, plan_Z, part_Z, top_Z, num_done_Z,
                        o_BNH, scale);
  in.prefix = {data_of<const float>(prefix_output_KZH), data_of<const float>(prefix_top_KZ),
               data_of<const float>(prefix_sum_KZ),
               reinterpret_cast<const PartPlaces*>(data_of<const int>(place_BX)),
               static_cast<int>(prefix_top_KZ.size(1))};
  launch_ranges(in, q_BNH, num_ranges, starts_early);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_decode, plan_decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_ranges, attend_ranges_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_suffixes, attend_suffixes_of);
