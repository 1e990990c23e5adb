// Keys and values of a sequence in their pages, block after block.
//
// Pages are scattered in memory, so the processor's own prefetcher does not find them. The next
// block is therefore known, and can be prefetched, while one is computed.
//
// A lane has 32 bits: a float, or a pair of bfloat16.

#pragma once

#include <array>
#include <cstring>

#include "cpu.h"
#include "transpose.h"

namespace {

constexpr int64_t kKeys = 64;  // keys in a block
constexpr int64_t kCacheLine = 64;

// What a lane holds of a tensor of T: kParts elements.
template <class T>
struct Lane {
  using Scalar = float;
  using Vector = Floats;
  static constexpr int64_t kParts = 1;
};
template <>
struct Lane<bf16> {
  using Scalar = uint32_t;
  using Vector = Pairs;
  static constexpr int64_t kParts = 2;
};

inline Floats multiply_add(Floats b, float a, Floats sum) { return sum + a * b; }
inline Floats multiply_add(Floats a, Floats b, Floats sum) { return sum + a * b; }
inline Floats multiply_add(Pairs b, uint32_t a, Floats sum) {
  return multiply_add(b, Pairs{} + a, sum);
}

template <class V>
V load(const void* x) {
  V value;
  std::memcpy(&value, x, sizeof(value));
  return value;
}

// Where the keys and values from position `key` on are. Entries after the last one repeat it.
template <class T>
struct Block {
  int64_t key = 0, num_keys = 0;
  std::array<const T*, kKeys> k, v;

  void prefetch(int64_t l, int64_t width) const {
    if (l >= num_keys) return;
    for (int64_t h = 0; h < width; h += kCacheLine / int64_t(sizeof(T))) {
      __builtin_prefetch(k[l] + h);
      __builtin_prefetch(v[l] + h);
    }
  }

  // Copy the values of kParts keys to each line, so that a lane has one dimension of them. Lines
  // are `stride` lanes apart. Returns the number of lines.
  int64_t copy_values(int64_t width, typename Lane<T>::Scalar* line, int64_t stride) const {
    constexpr int64_t kParts = Lane<T>::kParts;
    for (int64_t l = 0; l < num_keys; l += kParts, line += stride) {
      if constexpr (kParts == 1)
        std::memcpy(line, v[l], width * sizeof(T));
      else
        interleave(v[l], v[l + 1], width, line);
    }
    return round_up(num_keys, kParts) / kParts;
  }

  // Copy `num` keys to rows of `width`. Rows after the last key repeat it.
  void copy_keys(int64_t num, int64_t width, T* row) const {
    for (int64_t l = 0; l < num; ++l) std::memcpy(row + l * width, k[l], width * sizeof(T));
  }

  // Copy the values of `num` keys transposed: a row has one dimension of kKeys keys. `num` is a
  // multiple of the keys of a square, and the width of its dimensions.
  void turn_values(int64_t num, int64_t width, typename Lane<T>::Scalar* rows) const {
    if constexpr (Lane<T>::kParts == 2)
      for (int64_t l = 0; l < num; l += 2 * kFloats)
        for (int64_t h = 0; h < width; h += kFloats) {
          Pairs square[kFloats];
          for (int i = 0; i < kFloats; ++i)
            square[i] = interleave(v[l + 2 * i] + h, v[l + 2 * i + 1] + h);
          transpose(square);
          for (int i = 0; i < kFloats; ++i)
            std::memcpy(rows + (h + i) * kKeys / 2 + l / 2, &square[i], sizeof(Pairs));
        }
  }

 private:
  static Pairs interleave(const bf16* low, const bf16* high) {
    typedef bf16 Half __attribute__((vector_size(2 * kFloats)));
    return __builtin_convertvector(load<Half>(low), Pairs) |
           __builtin_convertvector(load<Half>(high), Pairs) << 16;
  }
  static void interleave(const bf16* low, const bf16* high, int64_t width, uint32_t* line) {
    int64_t h = 0;
    for (; h + kFloats <= width; h += kFloats) {
      Pairs pairs = interleave(low + h, high + h);
      std::memcpy(line + h, &pairs, sizeof(pairs));
    }
    for (; h < width; ++h) line[h] = low[h] | uint32_t(high[h]) << 16;
  }
};

// Where the keys and values of all sequences are. Dimensions: H head width, K kv heads, P pages, Q
// positions of a page, R rows of the table.
struct Pool {
  Pages k_PQKH, v_PQKH;
  const TensorView& page_table_RP;

  // Point a block at the positions [key, end) of a sequence, as many as fit.
  template <class T>
  void find(int64_t sequence, int64_t kv_head, int64_t key, int64_t end, Block<T>& block) const {
    const int32_t* pages = row<int32_t>(page_table_RP, sequence);
    block.key = key;
    block.num_keys = std::clamp<int64_t>(end - key, 0, kKeys);
    for (int64_t l = 0; l < block.num_keys;) {
      int64_t page = pages[(key + l) / k_PQKH.size], position = (key + l) % k_PQKH.size;
      const T* k = k_PQKH.at<T>(page, position, kv_head);
      const T* v = v_PQKH.at<T>(page, position, kv_head);
      int64_t next = std::min(l + k_PQKH.size - position, block.num_keys);
      for (; l < next; ++l, k += k_PQKH.position_stride, v += v_PQKH.position_stride) {
        block.k[l] = k;
        block.v[l] = v;
      }
    }
    if (!block.num_keys) return;
    std::fill(block.k.begin() + block.num_keys, block.k.end(), block.k[block.num_keys - 1]);
    std::fill(block.v.begin() + block.num_keys, block.v.end(), block.v[block.num_keys - 1]);
  }
};

// Call f with each block of the positions [begin, end), and with the next one, empty after the
// last.
template <class T, class F>
void for_blocks(const Pool& pool, int64_t sequence, int64_t kv_head, int64_t begin, int64_t end,
                F f) {
  Block<T> blocks[2];
  pool.find(sequence, kv_head, begin, end, blocks[0]);
  for (int i = 0; blocks[i].num_keys; i = 1 - i) {
    pool.find(sequence, kv_head, blocks[i].key + kKeys, end, blocks[1 - i]);
    f(blocks[i], blocks[1 - i]);
  }
}

}  // namespace
