// A processor's matrix unit: Intel's AMX.
//
// A register of the unit is a tile: 16 rows of 64 bytes. It multiplies 16 rows of 32 bfloat16, as
// they lie in memory, with 16 columns, of which pairs of neighbours lie side by side:
//
//     a: 16 rows x 32 inputs      b: 16 pairs of inputs x 16 columns      c: 16 rows x 16 columns
//
// Two tiles of rows and two of columns make four of sums, so each tile is loaded for two products.

#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "cpu.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define MINISGL_HAS_MATRIX_UNIT 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Whether the unit multiplies numbers of this type.
template <class T>
constexpr bool kIsForUnit = std::is_same_v<T, bf16>;

constexpr int64_t kTileRows = 16;    // rows of a tile, or columns of sums
constexpr int64_t kTileInputs = 32;  // inputs in a row of a tile
constexpr int64_t kTileBytes = 64;   // bytes in a row of any tile

// Whether this process may use the unit. Linux allows it only on request.
inline bool has_matrix_unit() {
  constexpr int kAskForState = 0x1023;  // ARCH_REQ_XCOMP_PERM of arch_prctl(2)
  constexpr int kTileData = 18;         // Intel's number of the tiles' state
  static const bool is_given = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  return is_given;
}

// Keeps a compiler from writing to memory after a tile is loaded from there: it may not know that
// the load reads memory.
inline void finish_writes() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Sets up the unit for a thread, for as long as the object lives. Of the eight tile registers, 0 to
// 3 hold full tiles, and 4 to 7 tiles of `num_rows` rows. For products of full tiles, 0 to 3 are
// sums, 4 and 5 rows, 6 and 7 columns.
class MatrixUnit {
 public:
  explicit MatrixUnit(bool is_used = true, int64_t num_rows = kTileRows) : is_used_(is_used) {
    Setup setup;
    for (int i = 4; i < 8; ++i) setup.rows[i] = static_cast<uint8_t>(num_rows);
    finish_writes();
    if (is_used_) _tile_loadconfig(&setup);
  }
  ~MatrixUnit() {
    if (is_used_) _tile_release();
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

 private:
  struct alignas(64) Setup {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  bool is_used_;
};

// One or two tiles of a or b. Their lines are `stride` bytes apart, and what is multiplied next is
// `step` bytes further on.
struct Operand {
  const void *first, *second;
  int64_t stride, step;
};

// Up to two by two tiles of sums in memory. Their lines are `stride` floats apart.
struct SumTiles {
  float* first;
  int64_t stride;

  float* at(int row, int column) const {
    return first + row * kTileRows * stride + column * kTileRows;
  }
};

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Loads the sums for kRows tiles of a and kColumns tiles of b: one or two of each.
template <int kRows, int kColumns>
inline void load_sums(const SumTiles& c) {
  finish_writes();
  int64_t stride = c.stride * sizeof(float);
  _tile_loadd(0, c.at(0, 0), stride);
  if constexpr (kColumns == 2) _tile_loadd(1, c.at(0, 1), stride);
  if constexpr (kRows == 2) _tile_loadd(2, c.at(1, 0), stride);
  if constexpr (kRows == 2 && kColumns == 2) _tile_loadd(3, c.at(1, 1), stride);
}

template <int kRows, int kColumns>
inline void store_sums(const SumTiles& c) {
  int64_t stride = c.stride * sizeof(float);
  _tile_stored(0, c.at(0, 0), stride);
  if constexpr (kColumns == 2) _tile_stored(1, c.at(0, 1), stride);
  if constexpr (kRows == 2) _tile_stored(2, c.at(1, 0), stride);
  if constexpr (kRows == 2 && kColumns == 2) _tile_stored(3, c.at(1, 1), stride);
}

// Add the products of `num_steps` times 32 inputs to the sums, and call `meanwhile` in each step.
template <int kRows, int kColumns, class F>
inline void add_products(const Operand& a, const Operand& b, int64_t num_steps, F meanwhile) {
  finish_writes();
  auto first_row = static_cast<const char*>(a.first);
  auto second_row = static_cast<const char*>(a.second);
  auto first = static_cast<const char*>(b.first);
  auto second = static_cast<const char*>(b.second);
  for (int64_t s = 0; s < num_steps; ++s) {
    _tile_loadd(4, first_row + s * a.step, a.stride);
    _tile_loadd(6, first + s * b.step, b.stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns == 2) {
      _tile_loadd(7, second + s * b.step, b.stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows == 2) {
      _tile_loadd(5, second_row + s * a.step, a.stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    }
    meanwhile(s);
  }
}

// c[i][r] = or += a(i, k) * b[k][r], summed over k, for 32 rows i and one or two vectors of r.
template <bool kAdds, int kColumns>
inline void multiply_tiles(const bf16* a, int64_t stride, int64_t depth, const void* b, float* c) {
  constexpr int64_t kLineBytes = kColumns * kTileBytes;
  Operand rows{a, a + kTileRows * stride, stride * int64_t(sizeof(bf16)), kTileBytes};
  Operand columns{b, static_cast<const char*>(b) + kTileBytes, kLineBytes,
                  kLineBytes * kTileInputs / 2};
  SumTiles sums{c, kColumns * kFloats};
  if constexpr (kAdds)
    load_sums<2, kColumns>(sums);
  else
    clear_sums();
  add_products<2, kColumns>(rows, columns, depth / kTileInputs, [](int64_t) {});
  store_sums<2, kColumns>(sums);
}

// c[i][r] = or += a(i, k) * b[k][r], summed over k. Rows of a are `stride` bfloat16s apart. A line
// of b has a pair of k; lines of b and of c have one or two vectors. The number of rows and the
// depth are multiples of 32.
template <bool kAdds, class A, class B>
inline void multiply_in_unit(const A* a, int64_t stride, int64_t num_rows, int64_t depth,
                             const B* b, Floats* c, int64_t num_vectors) {
  auto multiply = num_vectors == 2 ? multiply_tiles<kAdds, 2> : multiply_tiles<kAdds, 1>;
  auto rows = reinterpret_cast<const bf16*>(a);
  for (int64_t i = 0; i < num_rows; i += 2 * kTileRows)
    multiply(rows + i * stride, stride, depth, b, reinterpret_cast<float*>(c + i * num_vectors));
}

}  // namespace

#else

namespace {

template <class T>
constexpr bool kIsForUnit = false;

constexpr int64_t kTileInputs = 32;

inline bool has_matrix_unit() { return false; }

class MatrixUnit {
 public:
  explicit MatrixUnit(bool) {}
};

template <bool, class A, class B>
inline void multiply_in_unit(const A*, int64_t, int64_t, int64_t, const B*, Floats*, int64_t) {}

}  // namespace

#endif
