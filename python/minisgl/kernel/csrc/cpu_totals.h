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

// The totals of N vectors, in the first N lanes. N is a power of two, and not above kFloats.
template <int N>
inline Floats totals(Floats* x) {
  for (int num = N; num > 1; num /= 2)
    for (int i = 0; i < num / 2; ++i) x[i] = neighbours(x[2 * i], x[2 * i + 1]);
  for (int num = N; num < kFloats; num *= 2) x[0] = neighbours(x[0], x[0]);
  return x[0];
}

}  // namespace
