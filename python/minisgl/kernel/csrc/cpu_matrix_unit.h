// The product of tokens with a bfloat16 weight in a processor's matrix unit: Intel's AMX.
//
// A register of the unit is a tile of 16 rows of 64 bytes. It multiplies 16 outputs, whose rows lie
// in memory as it takes them, with 16 tokens, whose pairs of neighbours have to lie side by side:
//
//     weight: 16 outputs x 32 inputs      tokens: 16 pairs of inputs x 16 tokens
//
// Two tiles of outputs and two of tokens make four of sums, so each tile is loaded for two products.
//
// Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu.h"
#include "divided_loop.h"
#include "transpose.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kUnitRows = 16;    // outputs or tokens of a tile
constexpr int64_t kUnitInputs = 32;  // of a row of the weight in a tile
constexpr int64_t kUnitBytes = 64;   // of a row of any tile

// All eight registers hold full tiles: 0 to 3 sums, 4 and 5 outputs, 6 and 7 tokens.
struct alignas(64) UnitSetup {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr UnitSetup kUnitSetup;

// Whether this process may use the unit. Linux gives it only to who asks.
inline bool has_matrix_unit() {
  constexpr int kAskForState = 0x1023, kTileData = 18;  // arch_prctl(2), Intel's number of the state
  static const bool is_given = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  return is_given;
}

inline bool matrix_unit_takes(const TensorView& weight_OI) {
  bool fits = weight_OI.size(0) % kUnitRows == 0 && weight_OI.size(1) % kUnitInputs == 0;
  return fits && has_matrix_unit();
}

// Tokens in blocks of 16; after the last one come zeros. Of each block, squares of 32 inputs.
class TokenTiles {
 public:
  explicit TokenTiles(const TensorView& x_TI)
      : x_TI_(x_TI),
        num_blocks_((x_TI.size(0) + kUnitRows - 1) / kUnitRows),
        num_squares_(x_TI.size(1) / kUnitInputs),
        pairs_(num_blocks_ * num_squares_ * kUnitRows) {}

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_squares() const { return num_squares_; }
  const Pairs* square(int64_t block, int64_t s) const {
    return &pairs_[(block * num_squares_ + s) * kUnitRows];
  }

  // All threads of a parallel region call it, and go on when all is read.
  void read() {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_blocks_ * num_squares_; ++i) {
      int64_t first = i / num_squares_ * kUnitRows, input = i % num_squares_ * kUnitInputs;
      int64_t num_tokens = std::min(kUnitRows, x_TI_.size(0) - first);
      Pairs square[kFloats] = {};
      for (int64_t t = 0; t < num_tokens; ++t)
        std::memcpy(&square[t], row<const bf16>(x_TI_, first + t) + input, sizeof(Pairs));
      transpose(square);
      std::memcpy(&pairs_[i * kUnitRows], square, sizeof(square));
    }
  }

 private:
  const TensorView& x_TI_;
  int64_t num_blocks_, num_squares_;
  std::vector<Pairs> pairs_;
};

// The product of one or two tiles of outputs with all tokens.
class UnitProduct {
 public:
  UnitProduct(const TensorView& weight_OI, const bf16* bias, const TokenTiles& tokens,
              const TensorView& y_TO)
      : weight_OI_(weight_OI), bias_(bias), tokens_(tokens), y_TO_(y_TO) {}

  template <int kTiles>
  void multiply(int64_t output) const {
    int64_t num_blocks = tokens_.num_blocks();
    for (int64_t block = 0; block + 1 < num_blocks; block += 2) multiply<kTiles, 2>(output, block);
    if (num_blocks % 2) multiply<kTiles, 1>(output, num_blocks - 1);
  }

 private:
  // Meanwhile the first blocks fetch the weights of the outputs that come next.
  template <int kTiles, int kBlocks>
  void multiply(int64_t output, int64_t block) const {
    int64_t stride = weight_OI_.stride(0) * sizeof(bf16);
    const bf16* first = row<const bf16>(weight_OI_, output);
    const bf16* second = row<const bf16>(weight_OI_, output + (kTiles - 1) * kUnitRows);
    int64_t next = output + 2 * kUnitRows;
    int64_t num_fetched = block ? 0 : std::clamp(weight_OI_.size(0) - next, 0L, 2 * kUnitRows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < tokens_.num_squares(); ++s) {
      _tile_loadd(6, tokens_.square(block, s), kUnitBytes);
      if constexpr (kBlocks == 2) _tile_loadd(7, tokens_.square(block + 1, s), kUnitBytes);
      _tile_loadd(4, first + s * kUnitInputs, stride);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kBlocks == 2) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTiles == 2) {
        _tile_loadd(5, second + s * kUnitInputs, stride);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kBlocks == 2) _tile_dpbf16ps(3, 5, 7);
      }
      for (int64_t r = 0; r < num_fetched; ++r)
        __builtin_prefetch(row<const bf16>(weight_OI_, next + r) + s * kUnitInputs, 0, 2);
    }
    alignas(64) float sums_OT[kUnitRows][kUnitRows];
    _tile_stored(0, sums_OT, kUnitBytes);
    write(sums_OT, output, block);
    if constexpr (kBlocks == 2) {
      _tile_stored(1, sums_OT, kUnitBytes);
      write(sums_OT, output, block + 1);
    }
    if constexpr (kTiles == 2) {
      _tile_stored(2, sums_OT, kUnitBytes);
      write(sums_OT, output + kUnitRows, block);
      if constexpr (kBlocks == 2) {
        _tile_stored(3, sums_OT, kUnitBytes);
        write(sums_OT, output + kUnitRows, block + 1);
      }
    }
  }

  void write(const float (&sums_OT)[kUnitRows][kUnitRows], int64_t output, int64_t block) const {
    Pairs square[kFloats];
    std::memcpy(square, sums_OT, sizeof(square));
    transpose(square);
    int64_t first = block * kUnitRows;
    int64_t num_tokens = std::min(kUnitRows, y_TO_.size(0) - first);
    for (int64_t t = 0; t < num_tokens; ++t) {
      float sums[kUnitRows];
      std::memcpy(sums, &square[t], sizeof(sums));
      bf16* y = row<bf16>(y_TO_, first + t) + output;
      for (int64_t i = 0; i < kUnitRows; ++i)
        put(y[i], bias_ ? sums[i] + get(bias_[output + i]) : sums[i]);
    }
  }

  const TensorView& weight_OI_;
  const bf16* bias_;
  const TokenTiles& tokens_;
  const TensorView& y_TO_;
};

inline void multiply_in_matrix_unit(const TensorView& x_TI, const TensorView& weight_OI,
                                    const bf16* bias, const TensorView& y_TO) {
  int64_t num_outputs = weight_OI.size(0), both = 2 * kUnitRows;
  TokenTiles tokens(x_TI);
  DividedLoop tiles((num_outputs + both - 1) / both);
#pragma omp parallel if (weight_OI.numel() > kParallelWork)
  {
    tokens.read();
    UnitProduct product(weight_OI, bias, tokens, y_TO);
    _tile_loadconfig(&kUnitSetup);
    for (int64_t i = tiles.next(); i >= 0; i = tiles.next()) {
      if (num_outputs - i * both >= both) {
        product.multiply<2>(i * both);
      } else {
        product.multiply<1>(i * both);
      }
    }
    _tile_release();
  }
}

}  // namespace

#else

namespace {

inline bool matrix_unit_takes(const TensorView&) { return false; }
inline void multiply_in_matrix_unit(const TensorView&, const TensorView&, const bf16*,
                                    const TensorView&) {}

}  // namespace

#endif
