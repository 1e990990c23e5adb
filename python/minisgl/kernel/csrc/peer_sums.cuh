// The sum of the numbers of all ranks.
//
// A number is added up in float32 and in the order of the ranks, so that all ranks have equal bits.

#pragma once

#include <cstdint>

#include "peer_memory.cuh"

constexpr int kRanksAtOnce = 4;  // whose loads a thread has in flight

// How a word of 32 bits holds numbers: two of 16 bits, or one of 32.
struct BFloat16 {
  __device__ static void add(float (&sum)[2], uint32_t word) {
    sum[0] += __int_as_float(static_cast<int>(word << 16));
    sum[1] += __int_as_float(static_cast<int>(word & 0xffff0000));
  }
  __device__ static uint32_t round(const float (&sum)[2]) { return pack(sum[0], sum[1]); }
};

struct Float16 {
  __device__ static void add(float (&sum)[2], uint32_t word) {
    float2 numbers = unpack_float16(word);
    sum[0] += numbers.x;
    sum[1] += numbers.y;
  }
  __device__ static uint32_t round(const float (&sum)[2]) { return pack_float16(sum[0], sum[1]); }
};

struct Float32 {
  __device__ static void add(float (&sum)[2], uint32_t word) {
    sum[0] += __int_as_float(static_cast<int>(word));
  }
  __device__ static uint32_t round(const float (&sum)[2]) {
    return static_cast<uint32_t>(__float_as_int(sum[0]));
  }
};

// Adds up the words of all ranks, in the order of the ranks. `load(r)` begins to read those of rank
// r, and `words_of` turns what it returns into words. The loads of kRanksAtOnce ranks overlap.
template <class Number, int kWords, class Load, class WordsOf>
__device__ Words<kWords> sum_over(int num_ranks, Load load, WordsOf words_of) {
  float sum[kWords][2] = {};
#pragma unroll
  for (int begin = 0; begin < kMaxRanks; begin += kRanksAtOnce) {
    decltype(load(0)) loaded[kRanksAtOnce];
#pragma unroll
    for (int r = begin; r < begin + kRanksAtOnce; ++r)
      if (r < num_ranks) loaded[r - begin] = load(r);
#pragma unroll
    for (int r = begin; r < begin + kRanksAtOnce; ++r) {
      if (r >= num_ranks) continue;
      Words<kWords> words = words_of(r, loaded[r - begin]);
#pragma unroll
      for (int w = 0; w < kWords; ++w) Number::add(sum[w], words.word[w]);
    }
  }
  Words<kWords> result;
#pragma unroll
  for (int w = 0; w < kWords; ++w) result.word[w] = Number::round(sum[w]);
  return result;
}

// Adds up this thread's words and those of the other ranks r, which arrive at `place_of(r)`.
template <class Number, class PlaceOf>
__device__ Words<2> add_packets(const Channel& channel, Words<2> mine, PlaceOf place_of) {
  int rank = channel.group.rank;
  return sum_over<Number, 2>(
      channel.group.size,
      [&](int r) { return r == rank ? ulonglong2{} : load_pair(place_of(r)); },
      [&](int r, ulonglong2 packet) {
        return r == rank ? mine : channel.take(place_of(r), packet);
      });
}

// Adds up the vectors of all ranks r, which are at `place_of(r)`.
template <class Number, class PlaceOf>
__device__ Words<4> add_vectors(int num_ranks, PlaceOf place_of) {
  return sum_over<Number, 4>(
      num_ranks, [&](int r) { return load(place_of(r)); },
      [](int, Words<4> words) { return words; });
}
