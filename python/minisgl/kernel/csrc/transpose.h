// Transposes a square block of vectors.

#pragma once

#include "cpu.h"

namespace {

// A shuffle of two vectors in groups of `width` lanes: every second group, from `first` on, of the
// one and of the other vector in turns.
constexpr Ints every_second_group(int width, int first) {
  Ints order{};
  for (int i = 0; i < kFloats; ++i) {
    int group = i / width, lane = i % width;
    order[i] = group % 2 * kFloats + (group / 2 * 2 + first) * width + lane;
  }
  return order;
}

// Transpose a square, in place.
template <int kWidth = 1>
inline void transpose(Pairs (&square)[kFloats]) {
  if constexpr (kWidth < kFloats) {
    for (int i = 0; i < kFloats; ++i) {
      if (i & kWidth) continue;
      Pairs a = square[i], b = square[i + kWidth];
      square[i] = __builtin_shuffle(a, b, every_second_group(kWidth, 0));
      square[i + kWidth] = __builtin_shuffle(a, b, every_second_group(kWidth, 1));
    }
    transpose<2 * kWidth>(square);
  }
}

}  // namespace
