// Sums of rows over the ranks with the norm that follows them: `one_shot` and `two_shot` of
// all_reduce.cu.
//
// A block has whole rows, and a thread has one vector of each of its rows. That pays where a block
// has enough to do; so push has no norm.

#pragma once

#include <cstdint>

#include "peer_sums.cuh"

constexpr int kRowsAtOnce = 4;        // whose loads a thread has in flight
constexpr int kMaxRowVectors = 1024;  // one for each thread of a block

// The rows that are added up, and the norm of their sums. If `adds_residual`, the norm is of sum
// plus residual; `residual` receives what is normed.
struct Rows {
  unsigned char *x, *residual, *y;
  const unsigned char* weight;
  bool adds_residual;
  float eps;
  int num, width, vectors;  // rows; numbers and vectors of 16 bytes in a row

  __device__ Words<4>* vector(unsigned char* rows, int t) const {
    return reinterpret_cast<Words<4>*>(rows) + int64_t(t) * vectors + threadIdx.x;
  }
  __device__ bool has_vector() const { return static_cast<int>(threadIdx.x) < vectors; }
};

// The sum of x over the threads of the block. Two calls in a row must differ in `parity`: they use
// different buffers, so that one barrier is enough.
__device__ inline float sum_over_block(float x, int num_warps, int parity) {
  __shared__ float of_warps[2][kMaxRowVectors / 32];
  auto sum_over_warp = [](float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
  };
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = sum_over_warp(x);
  if (lane == 0) of_warps[parity][warp] = sum;
  __syncthreads();
  return sum_over_warp(lane < num_warps ? of_warps[parity][lane] : 0);
}

// The norm of this block's rows. Numbers are rounded where separate kernels would round them; only
// the squares are added up in another order.
template <class Number>
struct RowNorm {
  const Rows& rows;
  Words<4> weight{};

  __device__ explicit RowNorm(const Rows& rows) : rows(rows) {
    if (rows.has_vector())
      weight = reinterpret_cast<const Words<4>*>(rows.weight)[threadIdx.x];
  }

  __device__ Words<4> residual(int t) const {
    Words<4> value{};
    if (rows.adds_residual && rows.has_vector()) value = *rows.vector(rows.residual, t);
    return value;
  }

  // Finishes row t, whose sum over the ranks is `sum`. The block has finished `num_before` rows.
  __device__ void finish(int t, int num_before, Words<4> sum, Words<4> residual) const {
    float squares = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float number[2] = {};
      Number::add(number, sum.word[w]);
      Number::add(number, residual.word[w]);
      sum.word[w] = Number::round(number);
      float rounded[2] = {};
      Number::add(rounded, sum.word[w]);
      squares += rounded[0] * rounded[0] + rounded[1] * rounded[1];
    }
    if (!rows.has_vector()) squares = 0;
    int num_warps = (rows.vectors + 31) / 32;
    float sum_of_squares = sum_over_block(squares, num_warps, num_before % 2);
    float scale = rsqrtf(sum_of_squares / static_cast<float>(rows.width) + rows.eps);
    if (!rows.has_vector()) return;
    *rows.vector(rows.residual, t) = sum;
    Words<4> normed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float number[2] = {}, factor[2] = {};
      Number::add(number, sum.word[w]);
      Number::add(factor, weight.word[w]);
      number[0] = number[0] * scale * factor[0];
      number[1] = number[1] * scale * factor[1];
      normed.word[w] = Number::round(number);
    }
    *rows.vector(rows.y, t) = normed;
  }
};

template <class Number>
__global__ void __launch_bounds__(kMaxRowVectors)
    one_shot_rows(const __grid_constant__ Group group, const __grid_constant__ Rows rows) {
  RowNorm<Number> norm(rows);
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int share = (rows.num + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  int num = min(share, rows.num - first);
  auto place = [&](int to, int from, int i) {
    return channel.parts(to) + (share * from + i) * rows.vectors + threadIdx.x;
  };
  if (rows.has_vector())
    for (int i = 0; i < num; ++i) {
      Words<4> mine = *rows.vector(rows.x, first + i);
      for (int step = 1; step <= group.size; ++step)
        store(place(channel.other(step), group.rank, i), mine);
    }
  Words<4> residual = num > 0 ? norm.residual(first) : Words<4>{};
  channel.meet(0);
  for (int i = 0; i < num; ++i) {
    Words<4> sum{};
    if (rows.has_vector())
      sum = add_vectors<Number>(group.size, [&](int r) { return place(group.rank, r, i); });
    norm.finish(first + i, i, sum, residual);
    if (i + 1 < num) residual = norm.residual(first + i + 1);
  }
  channel.end();
}

// Rank r adds up those rows of a channel whose number is r modulo the number of ranks.
template <class Number>
__global__ void __launch_bounds__(kMaxRowVectors)
    two_shot_rows(const __grid_constant__ Group group, const __grid_constant__ Rows rows) {
  RowNorm<Number> norm(rows);
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int share = (rows.num + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  int end = min(first + share, rows.num);
  auto part = [&](int to, int from, int t) {
    int place = (t - first) / group.size * group.size + from;
    return channel.parts(to) + place * rows.vectors + threadIdx.x;
  };
  auto sum_at = [&](int to, int t) {
    return channel.sums(to) + (t - first) * rows.vectors + threadIdx.x;
  };
  if (rows.has_vector())
    for (int begin = first; begin < end; begin += kRowsAtOnce) {
      Words<4> value[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i)
        if (begin + i < end) value[i] = *rows.vector(rows.x, begin + i);
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        int t = begin + i;
        if (t < end) store(part(t % group.size, group.rank, t), value[i]);
      }
    }
  channel.meet(0);
  if (rows.has_vector())
    for (int t = first; t < end; ++t) {
      if (t % group.size != group.rank) continue;
      Words<4> sum =
          add_vectors<Number>(group.size, [&](int r) { return part(group.rank, r, t); });
      for (int step = 1; step <= group.size; ++step) store(sum_at(channel.other(step), t), sum);
    }
  Words<4> residual = first < end ? norm.residual(first) : Words<4>{};
  channel.meet(1);
  for (int t = first; t < end; ++t) {
    Words<4> sum = rows.has_vector() ? load(sum_at(group.rank, t)) : Words<4>{};
    norm.finish(t, t - first, sum, residual);
    if (t + 1 < end) residual = norm.residual(t + 1);
  }
  channel.end();
}
