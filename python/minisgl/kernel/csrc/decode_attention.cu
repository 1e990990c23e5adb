// Attention of single queries over paged contexts: every warp reads as many tokens as every other.
//
// The contexts of a step, laid end to end, are one line of tiles of 16 tokens. It is cut into
// ranges of equal length, each for one warp a kv head, however long or short the requests are
// ("Stream-K", Osama et al. 2023, arXiv:2301.03598). A cut inside a request makes splits of its
// context, called `part` in the code. Each split is softmaxed by itself, and the warp that finishes
// last joins them ("Flash-Decoding", Dao et al. 2023). `plan_decode` makes the cuts, on the device,
// once a step; `attend_ranges` runs once a layer. The contract stands in decode_attention.py.
//
// A warp keeps everything in registers. It multiplies 8 query rows by 16 keys, and 16 values by the
// weights. Only as many rows are used as query heads share the kv head. Any order of the dimensions
// gives the same product, so a thread loads 16 bytes of a key as they lie and uses them as its
// words of a fragment. Values are paired over tokens by byte shuffles.
//
// Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, R rows of the
// tables, S kv slots, Z entries of a flat list.

#include <cmath>
#include <cstdint>

#include "launch.cuh"

namespace {

using tvm::ffi::TensorView;

constexpr int kTile = 16, kRows = 8, kPlanThreads = 1024;
constexpr float kNone = -1e30f;

// Where a request lies on the line of tiles: its tiles, its tokens, and its row of the page table.
struct Request {
  int first_tile, num_tiles, length, row;
};

// What `plan_decode` writes: the size of a range and the number of tiles; for each range the
// request that it begins in and the tile of that request; and the requests.
struct Plan {
  int* data;
  int num_ranges;

  __device__ int2* start_of(int range) const { return reinterpret_cast<int2*>(data) + 1 + range; }
  __device__ Request* request(int b) const {
    return reinterpret_cast<Request*>(data + 4 * (num_ranges / 2 + 1)) + b;
  }
  __device__ Request fresh_request(int b) const {
    int4 x = load_fresh(reinterpret_cast<const int4*>(request(b)));
    return {x.x, x.y, x.z, x.w};
  }
};

__global__ void __launch_bounds__(kPlanThreads)
    plan_ranges(const int* position, const int* row, int num_requests, int least_tiles, Plan plan) {
  __shared__ int sum_of_warps[kPlanThreads / 32], before;
  // No kernel may start early here: `attend_ranges` reads this plan before it waits itself.
  wait_for_inputs();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) before = 0;
  for (int first = 0; first < num_requests; first += kPlanThreads) {
    int b = first + threadIdx.x;
    int tiles = b < num_requests ? position[b] / kTile + 1 : 0, sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) sum_of_warps[warp] = sum;
    __syncthreads();
    int total = before;
    for (int w = 0; w < warp; ++w) total += sum_of_warps[w];
    if (b < num_requests) *plan.request(b) = {total + sum - tiles, tiles, position[b] + 1, row[b]};
    __syncthreads();
    if (threadIdx.x == kPlanThreads - 1) before = total + sum;
    __syncthreads();
  }
  int size = max((before + plan.num_ranges - 1) / plan.num_ranges, least_tiles);
  if (threadIdx.x == 0) *plan.start_of(-1) = {size, before};
  for (int b = threadIdx.x; b < num_requests; b += kPlanThreads) {
    int begin = plan.request(b)->first_tile, end = begin + plan.request(b)->num_tiles;
    for (int range = (begin + size - 1) / size; range * size < end; ++range)
      *plan.start_of(range) = {b, range * size - begin};
  }
  __threadfence();
}

struct Pool {
  const uint16_t* data;
  int64_t stride_slot, stride_head;
};

struct Inputs {
  const uint16_t* q;
  Pool k, v;
  const int* page_table;
  Plan plan;
  uint16_t* o;
  float *part, *part_top;  // two of each range, for each kv head
  int* num_done;           // splits of each request and kv head; zero before and after
  int64_t stride_q, stride_o;
  int num_kv_heads, group, page_size, stride_pages;
  float scale;  // of scores, which are exponents of two
};

template <int kWidth>
struct Warp {
  static constexpr int kSteps = kWidth / 32;  // of 32 dimensions

  struct Tile {
    uint4 k[2][kSteps], v[4][kWidth / 64];
  };

  const Inputs& in;
  int head, g = threadIdx.x / 4, c = threadIdx.x % 4;
  uint4 q[kSteps];
  float o[kWidth / 16][4], top, sum;

  __device__ Warp(const Inputs& in, int head) : in(in), head(head) {}

  __device__ void begin(int b) {
    auto row = in.q + b * in.stride_q + (head * in.group + g) * kWidth + 8 * c;
    for (int j = 0; j < kSteps; ++j)
      q[j] = g < in.group ? *reinterpret_cast<const uint4*>(row + 32 * j) : uint4{};
    for (auto& x : o) x[0] = x[1] = x[2] = x[3] = 0;
    top = kNone;
    sum = 0;
  }

  // Loads the 16 slots from `slot` on.
  __device__ void load(Tile& x, int64_t slot) const {
    auto k = in.k.data + head * in.k.stride_head + (slot + g) * in.k.stride_slot + 8 * c;
    auto v = in.v.data + head * in.v.stride_head + (slot + 2 * c) * in.v.stride_slot + 8 * g;
#pragma unroll
    for (int n = 0; n < 2; ++n)
      for (int j = 0; j < kSteps; ++j)
        x.k[n][j] = *reinterpret_cast<const uint4*>(k + 8 * n * in.k.stride_slot + 32 * j);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      for (int j = 0; j < kWidth / 64; ++j) {
        auto value = v + (n % 2 + n / 2 * 8) * in.v.stride_slot + 64 * j;
        x.v[n][j] = *reinterpret_cast<const uint4*>(value);
      }
  }

  // Attends to the first `num` tokens of the tile.
  __device__ void attend(Tile& x, int num) {
    float score[2][4] = {};
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
      for (int n = 0; n < 2; ++n) {
        multiply(score[n], {q[j].x, 0, q[j].y, 0}, {x.k[n][j].x, x.k[n][j].y});
        multiply(score[n], {q[j].z, 0, q[j].w, 0}, {x.k[n][j].z, x.k[n][j].w});
      }
    if (num < kTile) {  // what follows the last token may be anything
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        bool counts = 2 * c + n % 2 + n / 2 * 8 < num;
        if (!counts) score[n / 2][n % 2] = -INFINITY;
        for (auto& word : x.v[n])
          if (!counts) word = uint4{};
      }
    }
    float most = fmaxf(fmaxf(score[0][0], score[0][1]), fmaxf(score[1][0], score[1][1])) * in.scale;
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    if (__any_sync(0xffffffff, most > top)) {
      float new_top = fmaxf(top, most), shrink = exp2f(top - new_top);
      top = new_top;
      sum *= shrink;
      float left = of_head(shrink, 2 * c), right = of_head(shrink, 2 * c + 1);
#pragma unroll
      for (auto& y : o) y[0] *= left, y[1] *= right, y[2] *= left, y[3] *= right;
    }
    uint32_t weight[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float a = exp2f(score[n][0] * in.scale - top), b = exp2f(score[n][1] * in.scale - top);
      weight[n] = pack(a, b);
      sum += a + b;
    }
#pragma unroll
    for (int j = 0; j < kWidth / 64; ++j) {
      const uint32_t *v0 = &x.v[0][j].x, *v1 = &x.v[1][j].x;
      const uint32_t *v2 = &x.v[2][j].x, *v3 = &x.v[3][j].x;
      for (int p = 0; p < 4; ++p) {
        uint32_t low = __byte_perm(v0[p], v1[p], 0x5410);
        uint32_t high = __byte_perm(v0[p], v1[p], 0x7632);
        uint32_t low_8 = __byte_perm(v2[p], v3[p], 0x5410);
        uint32_t high_8 = __byte_perm(v2[p], v3[p], 0x7632);
        multiply(o[4 * j + p], {low, high, low_8, high_8}, {weight[0], weight[1]});
      }
    }
  }

  // The value of the threads that have this head's scores.
  __device__ float of_head(float x, int row) const {
    return __shfl_sync(0xffffffff, x, 4 * row + c);
  }

  __device__ void end() {
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
  }

  // Writes the output of two heads, 8 dimensions in each 64.
  __device__ void write(int b) const {
    for (int side = 0; side < 2; ++side) {
      float factor = 1 / of_head(sum, 2 * c + side);
      if (2 * c + side >= in.group) continue;
      auto row = in.o + b * in.stride_o + (head * in.group + 2 * c + side) * kWidth + 8 * g;
      for (int j = 0; j < kWidth / 64; ++j) {
        uint32_t word[4];
        for (int p = 0; p < 4; ++p)
          word[p] = pack(o[4 * j + p][side] * factor, o[4 * j + p][side + 2] * factor);
        *reinterpret_cast<uint4*>(row + 64 * j) = {word[0], word[1], word[2], word[3]};
      }
    }
  }

  __device__ float* part_of(int place) const {
    return in.part + int64_t(place * in.num_kv_heads + head) * in.group * kWidth;
  }

  __device__ float* top_of(int place) const {
    return in.part_top + (place * in.num_kv_heads + head) * 2 * kRows;
  }

  __device__ void write_part(int place) const {
    for (int side = 0; side < 2; ++side) {
      if (2 * c + side >= in.group) continue;
      auto row = part_of(place) + (2 * c + side) * kWidth + 8 * g;
      for (int j = 0; j < kWidth / 64; ++j)
        for (int p = 0; p < 4; p += 2)
          *reinterpret_cast<float4*>(row + 64 * j + 2 * p) = {
              o[4 * j + p][side], o[4 * j + p][side + 2],
              o[4 * j + p + 1][side], o[4 * j + p + 1][side + 2]};
    }
    if (c == 0) {
      top_of(place)[g] = top;
      top_of(place)[kRows + g] = sum;
    }
  }

  // Whether all other splits of the request have been written; from then on they can be read.
  __device__ bool is_last(int b, int num_parts) const {
    __threadfence();
    __syncwarp();
    int num = 0;
    if (threadIdx.x == 0) {
      int* done = in.num_done + b * in.num_kv_heads + head;
      num = atomicAdd(done, 1) + 1;
      if (num == num_parts) *done = 0;
    }
    num = __shfl_sync(0xffffffff, num, 0);
    __threadfence();
    return num == num_parts;
  }

  // The splits lie at `first`, then at each second place from `second` on. A turn joins two rows,
  // of which a thread has four dimensions. It has no conditions, so that all splits load together.
  __device__ void join(int b, int num_parts, int first, int second) const {
    int d = 4 * threadIdx.x;
    if (d >= kWidth) return;
    for (int begin = 0; begin < in.group; begin += 2) {
      int row[2] = {begin, min(begin + 1, in.group - 1)};
      float most[2] = {kNone, kNone}, total[2] = {}, result[2][4] = {};
#pragma unroll 8
      for (int i = 0; i < num_parts; ++i) {
        int place = i == 0 ? first : second + 2 * (i - 1);
        for (int r = 0; r < 2; ++r) {
          float x_top = load_fresh(top_of(place) + row[r]);
          float x_sum = load_fresh(top_of(place) + kRows + row[r]);
          auto numbers = part_of(place) + row[r] * kWidth + d;
          float4 x = load_fresh(reinterpret_cast<const float4*>(numbers));
          float new_most = fmaxf(most[r], x_top);
          float shrink = exp2f(most[r] - new_most), weight = exp2f(x_top - new_most);
          most[r] = new_most;
          total[r] = total[r] * shrink + x_sum * weight;
          result[r][0] = result[r][0] * shrink + x.x * weight;
          result[r][1] = result[r][1] * shrink + x.y * weight;
          result[r][2] = result[r][2] * shrink + x.z * weight;
          result[r][3] = result[r][3] * shrink + x.w * weight;
        }
      }
      for (int r = 0; r < 2; ++r) {
        float factor = 1 / total[r], (&x)[4] = result[r];
        uint2 words = {pack(x[0] * factor, x[1] * factor), pack(x[2] * factor, x[3] * factor)};
        auto output = in.o + b * in.stride_o + (head * in.group + row[r]) * kWidth + d;
        *reinterpret_cast<uint2*>(output) = words;
      }
    }
  }
};

template <int kWidth>
__global__ void __launch_bounds__(32, 8) attend_ranges(const Inputs in) {
  int range = blockIdx.x / in.num_kv_heads;
  Warp<kWidth> warp(in, blockIdx.x % in.num_kv_heads);
  typename Warp<kWidth>::Tile now, next;
  auto [size, num_tiles] = load_fresh(in.plan.start_of(-1));
  int place = range * size, end_of_range = min(place + size, num_tiles);
  if (place >= end_of_range) return;
  auto [b, begin] = load_fresh(in.plan.start_of(range));
  for (bool waits = true; place < end_of_range; ++b, begin = 0) {
    auto [first, num, length, row] = in.plan.fresh_request(b);
    int end = min(begin + end_of_range - place, num);
    const int* pages = in.page_table + int64_t(row) * in.stride_pages;
    auto slot_of = [&](int tile) {
      int token = tile * kTile;
      return int64_t(pages[token / in.page_size]) * in.page_size + token % in.page_size;
    };
    bool is_old = begin + 1 < num;  // the last tile has the token of this step
    if (is_old) warp.load(now, slot_of(begin));
    if (waits) {
      wait_for_inputs();
      let_next_start();
      waits = false;
    }
    if (!is_old) warp.load(now, slot_of(begin));
    warp.begin(b);
    int64_t slot = begin + 1 < end ? slot_of(begin + 1) : 0;
    for (int tile = begin; tile < end; ++tile) {
      if (tile + 1 < end) warp.load(next, slot);
      if (tile + 2 < end) slot = slot_of(tile + 2);
      warp.attend(now, length - tile * kTile);
      now = next;
    }
    warp.end();
    int first_range = first / size, num_parts = (first + num - 1) / size - first_range + 1;
    if (num_parts == 1) {
      warp.write(b);
    } else {
      warp.write_part(2 * range + (place > range * size));
      if (warp.is_last(b, num_parts))
        warp.join(b, num_parts, 2 * first_range + (first > first_range * size),
                  2 * first_range + 2);
    }
    place += end - begin;
  }
}

}  // namespace

void plan_decode(TensorView position_B, TensorView row_B, int64_t num_ranges, int64_t least_tiles,
                 TensorView plan_Z) {
  launch(position_B.device(), 1, kPlanThreads, plan_ranges, data_of<const int>(position_B),
         data_of<const int>(row_B), static_cast<int>(position_B.size(0)),
         static_cast<int>(least_tiles),
         Plan{data_of<int>(plan_Z), static_cast<int>(num_ranges)});
}

void attend_ranges_of(TensorView q_BNH, TensorView k_SKH, TensorView v_SKH,
                      TensorView page_table_RP, int64_t page_size, TensorView plan_Z,
                      int64_t num_ranges, TensorView part_Z, TensorView top_Z,
                      TensorView num_done_Z, TensorView o_BNH, double scale, bool starts_early) {
  int num_kv_heads = static_cast<int>(k_SKH.size(1)), width = static_cast<int>(k_SKH.size(2));
  auto pool = [](const TensorView& x) {
    return Pool{data_of<const uint16_t>(x), x.stride(0), x.stride(1)};
  };
  Inputs in{data_of<const uint16_t>(q_BNH),
            pool(k_SKH),
            pool(v_SKH),
            data_of<const int>(page_table_RP),
            Plan{data_of<int>(plan_Z), static_cast<int>(num_ranges)},
            data_of<uint16_t>(o_BNH),
            data_of<float>(part_Z),
            data_of<float>(top_Z),
            data_of<int>(num_done_Z),
            q_BNH.stride(0),
            o_BNH.stride(0),
            num_kv_heads,
            static_cast<int>(q_BNH.size(1)) / num_kv_heads,
            static_cast<int>(page_size),
            static_cast<int>(page_table_RP.stride(0)),
            1.44269504f * static_cast<float>(scale)};
  auto kernel = width == 128 ? attend_ranges<128> : attend_ranges<64>;
  int num_blocks = static_cast<int>(num_ranges) * num_kv_heads;
  launch(starts_early, q_BNH.device(), num_blocks, 32, kernel, in);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_decode, plan_decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_ranges, attend_ranges_of);
