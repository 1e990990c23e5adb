// Adds up the lanes of vectors.

#pragma once

#include "cpu.h"

namespace {

constexpr Ints every_second(int first) {
  Ints order{};
  for (int i = 0; i < kFloats; ++i) order[i] = 2 * i + first;
  return order;
}

// Sums of two neighbouring lanes: of a first, then of b.
inline Floats neighbours(Floats a, Floats b) {
  return __builtin_shuffle(a, b, every_second(0)) + __builtin_shuffle(a, b, every_second(1));
}

// The totals of N vectors, in the first N lanes. N is a power of two, and not above kFloats. The
// loops are unrolled, so that x stays in registers.
template <int N>
__attribute__((always_inline)) inline Floats totals(Floats* x) {
#pragma GCC unroll 16
  for (int num = N; num > 1; num /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < num / 2; ++i) x[i] = neighbours(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 16
  for (int num = N; num < kFloats; num *= 2) x[0] = neighbours(x[0], x[0]);
  return x[0];
}

}  // namespace
