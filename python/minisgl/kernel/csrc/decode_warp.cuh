// The work of one warp in attention of single queries: it attends for one request and one kv head,
// over some tiles of 16 tokens of the context.
//
// A warp keeps everything in registers. It multiplies 8 query rows by 16 keys, and 16 values by the
// weights. Only as many rows are used as query heads share the kv head. Any order of the dimensions
// gives the same product, so a thread loads 16 bytes of a key as they lie and uses them as its
// words of a fragment. Values are paired over tokens by byte shuffles.

#pragma once

#include <cmath>
#include <cstdint>

#include "launch.cuh"

using tvm::ffi::TensorView;

constexpr int kTile = 16, kRows = 8;
constexpr float kNone = -1e30f, kLog2e = 1.44269504f;

struct Pool {
  const uint16_t* data;
  int64_t stride_slot, stride_head;
};

// Queries, where their contexts are, and where the output goes.
struct Decodes {
  const uint16_t* q;
  Pool k, v;
  const int* page_table;
  uint16_t* o;
  int64_t stride_q, stride_o;
  int num_kv_heads, group, page_size, stride_pages;
  float scale;  // factor of the scores, which become exponents of two

  __device__ const int* pages_of(int row) const { return page_table + int64_t(row) * stride_pages; }

  // The slot at which a tile of a context begins. Pages follow each other in the pools without a
  // gap.
  __device__ int64_t slot_of(const int* pages, int tile) const {
    int token = tile * kTile;
    return int64_t(pages[token / page_size]) * page_size + token % page_size;
  }

  __device__ uint16_t* output(int b, int head, int row, int width) const {
    return o + b * stride_o + (head * group + row) * width;
  }
};

inline Decodes decodes_of(TensorView q_BNH, TensorView k_PQKH, TensorView v_PQKH,
                          TensorView page_table_RP, TensorView o_BNH, double scale) {
  auto pool = [](const TensorView& x) {
    return Pool{data_of<const uint16_t>(x), x.stride(1), x.stride(2)};
  };
  int num_kv_heads = static_cast<int>(k_PQKH.size(2));
  return {data_of<const uint16_t>(q_BNH),
          pool(k_PQKH),
          pool(v_PQKH),
          data_of<const int>(page_table_RP),
          data_of<uint16_t>(o_BNH),
          q_BNH.stride(0),
          o_BNH.stride(0),
          num_kv_heads,
          static_cast<int>(q_BNH.size(1)) / num_kv_heads,
          static_cast<int>(k_PQKH.size(1)),
          static_cast<int>(page_table_RP.stride(0)),
          kLog2e * static_cast<float>(scale)};
}

template <int kWidth>
struct DecodeWarp {
  static constexpr int kSteps = kWidth / 32;  // steps of 32 dimensions

  struct Tile {
    uint4 k[2][kSteps], v[4][kWidth / 64];
  };

  // g and c are the group of a lane and its number in the group, as in fragments of mma.m16n8k16.
  const Decodes& in;
  int head, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  uint4 q[kSteps];
  float o[kWidth / 16][4], top, sum;

  __device__ DecodeWarp(const Decodes& in, int head) : in(in), head(head) {}

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
    if (num < kTile) {  // slots after the last token may hold anything
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

  // The x of the threads that have the scores of query head `row`.
  __device__ float of_head(float x, int row) const {
    return __shfl_sync(0xffffffff, x, 4 * row + c);
  }

  __device__ void end() {
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
  }

  // Writes the warp's results for its query heads: outputs before they are divided by the sum,
  // [kRows][kWidth], and the maxima and sums of the rows, [2][kRows].
  __device__ void write_part(float* numbers, float* stats) const {
    for (int side = 0; side < 2; ++side) {
      if (2 * c + side >= in.group) continue;
      auto row = numbers + (2 * c + side) * kWidth + 8 * g;
      for (int j = 0; j < kWidth / 64; ++j)
        for (int p = 0; p < 4; p += 2)
          *reinterpret_cast<float4*>(row + 64 * j + 2 * p) = {
              o[4 * j + p][side], o[4 * j + p][side + 2],
              o[4 * j + p + 1][side], o[4 * j + p + 1][side + 2]};
    }
    if (c == 0) {
      stats[g] = top;
      stats[kRows + g] = sum;
    }
  }
};
