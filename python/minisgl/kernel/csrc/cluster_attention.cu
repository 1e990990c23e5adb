// Attention of a few single queries over paged contexts: each request and kv head has a cluster of
// blocks, if that suits the contexts; otherwise the warps take ranges of equal length.
//
// The warps of a cluster take the tiles of the context in turn. Each softmaxes its own tiles
// ("Flash-Decoding", Dao et al. 2023). A block merges the results of its warps, and sends every
// block of the cluster some of the dimensions, which that block merges and writes. So nothing goes
// through global memory, and there is one launch; with few requests such latencies bound a step.
// The work of a warp is in decode_warp.cuh and decode_ranges.cuh. The contract is in
// decode_attention.py.
//
// Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, Q positions
// of a page, R rows of the tables, Z entries of a flat list.

#include <cstdint>

#include "decode_ranges.cuh"
#include "launch.cuh"

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kMaxBlocks = 16, kMaxWidth = 128;

// Four dimensions of a row before they are divided by its sum, and the row's maximum and sum.
struct Part {
  float4 numbers;
  float top, sum;
};

// Merges the parts of one row. They are in shared memory, so that reading them twice is cheap.
template <class PartOf>
__device__ Part join(int num_parts, PartOf part_of) {
  Part result{{}, kNone, 0};
  for (int i = 0; i < num_parts; ++i) result.top = fmaxf(result.top, part_of(i).top);
  for (int i = 0; i < num_parts; ++i) {
    Part part = part_of(i);
    float weight = exp2f(part.top - result.top);
    result.sum += weight * part.sum;
    result.numbers.x += weight * part.numbers.x;
    result.numbers.y += weight * part.numbers.y;
    result.numbers.z += weight * part.numbers.z;
    result.numbers.w += weight * part.numbers.w;
  }
  return result;
}

__device__ float4 four_of(const float* place) { return *reinterpret_cast<const float4*>(place); }

// What a block merges: the parts of its warps, then the parts of all blocks for its share of the
// dimensions.
struct Shared {
  alignas(16) float of_warp[kWarps][kRows * kMaxWidth], stats_of_warp[kWarps][2 * kRows];
  alignas(16) float of_block[kRows * kMaxWidth], stats_of_block[kMaxBlocks][kRows][4];
};

// Not inside the template of the kernel, where the tests' stand-in for CUDA would not find it.
__device__ Shared& shared_memory() {
  __shared__ Shared shared;
  return shared;
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    attend_in_clusters(const Inputs in, int num_blocks) {
  Shared& shared = shared_memory();
  int cluster = blockIdx.x / num_blocks, block = blockIdx.x % num_blocks;
  int b = cluster / in.num_kv_heads, head = cluster % in.num_kv_heads;
  int warp_index = threadIdx.x / 32;
  Request request = in.plan.fresh_request(b);
  int num_tiles = request.num_tiles(), length = request.length;
  if (!in.plan.fresh_division().suits_clusters) {
    attend_range<kWidth>(in, blockIdx.x * kWarps + warp_index);
    return;
  }
  arrive_at_cluster();
  const int* pages = in.pages_of(request.row);

  DecodeWarp<kWidth> warp(in, head);
  typename DecodeWarp<kWidth>::Tile now, next;
  int step = kWarps * num_blocks, first = warp_index * num_blocks + block;
  bool is_old = is_older_tile(first, num_tiles);
  if (is_old) warp.load(now, in.slot_of(pages, first));
  int64_t slot = first + step < num_tiles ? in.slot_of(pages, first + step) : 0;
  wait_for_inputs();
  let_next_start();
  if (!is_old && first < num_tiles) warp.load(now, in.slot_of(pages, first));
  warp.begin(b);
  for (int tile = first; tile < num_tiles; tile += step) {
    if (tile + step < num_tiles) warp.load(next, slot);
    if (tile + 2 * step < num_tiles) slot = in.slot_of(pages, tile + 2 * step);
    warp.attend(now, length - tile * kTile);
    now = next;
  }
  warp.end();
  warp.write_part(shared.of_warp[warp_index], shared.stats_of_warp[warp_index]);
  __syncthreads();
  wait_for_cluster();  // until all blocks of the cluster have started

  int share = kWidth / num_blocks;  // dimensions that a block merges at the end
  auto place = [&](int from, int r) { return shared.of_block + (from * kRows + r) * share; };
  for (int i = threadIdx.x; i < in.group * kWidth / 4; i += kThreads) {
    int r = i / (kWidth / 4), d = i % (kWidth / 4) * 4;
    Part part = join(kWarps, [&](int w) {
      const float* stats = shared.stats_of_warp[w] + r;
      return Part{four_of(shared.of_warp[w] + r * kWidth + d), stats[0], stats[kRows]};
    });
    store_in_cluster(place(block, r) + d % share, part.numbers, d / share);
    if (d / 4 < num_blocks)
      store_in_cluster(shared.stats_of_block[block][r], {part.top, part.sum, 0, 0}, d / 4);
  }
  arrive_at_cluster();
  wait_for_cluster();
  for (int i = threadIdx.x; i < in.group * share / 4; i += kThreads) {
    int r = i / (share / 4), d = i % (share / 4) * 4;
    Part part = join(num_blocks, [&](int from) {
      auto& stats = shared.stats_of_block[from][r];
      return Part{four_of(place(from, r) + d), stats[0], stats[1]};
    });
    float factor = 1 / part.sum;
    uint2 words = {pack(part.numbers.x * factor, part.numbers.y * factor),
                   pack(part.numbers.z * factor, part.numbers.w * factor)};
    *reinterpret_cast<uint2*>(in.output(b, head, r, kWidth) + block * share + d) = words;
  }
}

auto kernel_for(int64_t width) {
  return width == 128 ? attend_in_clusters<128> : attend_in_clusters<64>;
}

}  // namespace

// num_blocks: blocks of a cluster.
void attend_in_clusters_of(TensorView q_BNH, TensorView k_PQKH, TensorView v_PQKH,
                           TensorView page_table_RP, TensorView plan_Z, int64_t num_blocks,
                           TensorView part_Z, TensorView top_Z, TensorView num_done_Z,
                           TensorView o_BNH, double scale, bool starts_early) {
  Inputs in = inputs_of(q_BNH, k_PQKH, v_PQKH, page_table_RP, plan_Z, part_Z, top_Z, num_done_Z,
                        o_BNH, scale);
  int num_clusters = in.plan.num_requests * in.num_kv_heads, size = static_cast<int>(num_blocks);
  launch(Start{starts_early, size}, q_BNH.device(), num_clusters * size, kThreads,
         kernel_for(k_PQKH.size(3)), in, size);
}

// How many clusters of `num_blocks` blocks the device of a tensor runs at a time.
int64_t num_decode_clusters(TensorView on_device, int64_t width, int64_t num_blocks) {
  tvm::ffi::CUDADeviceGuard guard(on_device.device().device_id);
  return num_clusters_at_once(kernel_for(width), kThreads, static_cast<int>(num_blocks));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_in_clusters, attend_in_clusters_of);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_decode_clusters, num_decode_clusters);
