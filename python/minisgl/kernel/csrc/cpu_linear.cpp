// The product of tokens with a bfloat16 weight, which is read once.
//
// A vector holds pairs of neighbours in a row. With few tokens a product is bound by reading the
// weight, so a vector has inputs of one output, and its lanes are added up at the end. With more, a
// tile of the weight is transposed first: a vector has one pair of inputs for each of several
// neighbouring outputs.
//
// Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu.h"
#include "cpu_totals.h"
#include "cpu_unit_linear.h"
#include "divided_loop.h"
#include "transpose.h"

namespace {

using Tokens = Matrix<const bf16>;
using Weight = Matrix<const bf16>;
using Outputs = Matrix<bf16>;

constexpr int kInputs = 2 * kFloats;  // inputs in a vector of pairs

// Up to kInputs elements, then zeros.
inline Pairs load(const bf16* x, int64_t length = kInputs) {
  Pairs pairs{};
  std::memcpy(&pairs, x, length * sizeof(bf16));
  return pairs;
}

// Prefetch what is a memory page further on. The processor's own prefetcher is behind: two cores of
// an Intel Xeon read 35 GB/s instead of 28, and two of an AMD EPYC that multiply 8 tokens 43
// instead of 33.
inline void fetch_ahead(const bf16* weight) {
  __builtin_prefetch(weight + 4096 / sizeof(bf16), 0, 2);
}

constexpr int64_t kChunk = 16;  // rows of the weight whose outputs are written together

// Outputs o, o + stride, ... of all tokens: kRows rows of the weight side by side. Those of a token
// and a row are written to y[(token * kRows + row) * kChunk].
template <int kRows, int kTokens>
void multiply_rows(const Tokens& x_TI, const Weight& weight_OI, const bf16* bias, int64_t o,
                   int64_t stride, bf16* y) {
  constexpr int kSums = kRows * kTokens;
  constexpr int kAtOnce = std::min<int>(kFloats, std::bit_ceil(unsigned(kSums)));
  int64_t width = weight_OI.width, whole = width / kInputs * kInputs;
  const bf16 *weight[kRows], *x[kTokens];
  for (int r = 0; r < kRows; ++r) weight[r] = weight_OI.row(o + r * stride);
  for (int t = 0; t < kTokens; ++t) x[t] = x_TI.row(t);
  Floats sum[(kSums + kAtOnce - 1) / kAtOnce * kAtOnce] = {};
  auto add = [&](int64_t i, int64_t length) {
    Pairs w[kRows];
    for (int r = 0; r < kRows; ++r) {
      w[r] = load(weight[r] + i, length);
      fetch_ahead(weight[r] + i);
    }
    for (int t = 0; t < kTokens; ++t) {
      Pairs pairs = load(x[t] + i, length);
      for (int r = 0; r < kRows; ++r)
        sum[t * kRows + r] = multiply_add(w[r], pairs, sum[t * kRows + r]);
    }
  };
  for (int64_t i = 0; i < whole; i += kInputs) add(i, kInputs);
  if (whole < width) add(whole, width - whole);
  for (int first = 0; first < kSums; first += kAtOnce) {
    Floats total = totals<kAtOnce>(sum + first);
    int end = std::min(kAtOnce, kSums - first);
    if (bias)
      for (int i = 0; i < end; ++i) total[i] += get(bias[o + (first + i) % kRows * stride]);
    Pairs bits = rounded(total);
    for (int i = 0; i < end; ++i) y[(first + i) * kChunk] = static_cast<bf16>(bits[i] >> 16);
  }
}

// Rows that are multiplied together share the loads of x. They are half a weight apart, since a
// processor prefetches streams that are far apart, but not two in one page: that takes twice as
// long.
//
// A chunk's outputs are gathered first: those of different tokens may be so far apart that they
// displace each other in a cache.
template <int kTokens>
void multiply(const Tokens& x_TI, const Weight& weight_OI, const bf16* bias, const Outputs& y_TO) {
  constexpr int kRows = 2;
  int64_t num_outputs = weight_OI.num_rows, stride = num_outputs / kRows;
  DividedLoop chunks((stride + kChunk - 1) / kChunk);
#pragma omp parallel if (weight_OI.numel() > kParallelWork)
  for (int64_t c = chunks.next(); c >= 0; c = chunks.next()) {
    bf16 y[kTokens * kRows * kChunk];
    int64_t first = c * kChunk, length = std::min(kChunk, stride - first);
    for (int64_t i = 0; i < length; ++i)
      multiply_rows<kRows, kTokens>(x_TI, weight_OI, bias, first + i, stride, y + i);
    for (int t = 0; t < kTokens; ++t)
      for (int r = 0; r < kRows; ++r)
        std::copy_n(y + (t * kRows + r) * kChunk, length, y_TO.row(t) + first + r * stride);
  }
  for (int64_t o = stride * kRows; o < num_outputs; ++o) {
    bf16 y[kTokens * kChunk];
    multiply_rows<1, kTokens>(x_TI, weight_OI, bias, o, 0, y);
    for (int t = 0; t < kTokens; ++t) y_TO.row(t)[o] = y[t * kChunk];
  }
}

constexpr int64_t kTileOutputs = 2 * kFloats;  // two vectors of outputs
constexpr int64_t kMaxTileTokens = kFloats == 16 ? 12 : 5;  // tokens whose sums fit the registers
constexpr int64_t kCacheLine = 64;

// The weights of kTileOutputs outputs; those after the last output repeat it. The pairs of all
// outputs for the same two inputs lie side by side. Zeros follow the last input.
class Tile {
 public:
  explicit Tile(const Weight& weight_OI)
      : weight_OI_(weight_OI),
        num_squares_((weight_OI.width + kInputs - 1) / kInputs),
        pairs_(2 * kFloats * num_squares_) {}

  void read(int64_t output) {
    output_ = output;
    int64_t width = weight_OI_.width, last = weight_OI_.num_rows - 1;
    for (int part = 0; part < 2; ++part)
      for (int64_t s = 0; s < num_squares_; ++s) {
        Pairs square[kFloats];
        int64_t length = std::min<int64_t>(kInputs, width - s * kInputs);
        for (int r = 0; r < kFloats; ++r) {
          int64_t o = std::min(output + part * kFloats + r, last);
          const bf16* weight = weight_OI_.row(o) + s * kInputs;
          square[r] = length == kInputs ? load(weight) : load(weight, length);
        }
        transpose(square);
        for (int i = 0; i < kFloats; ++i) pairs_[2 * (s * kFloats + i) + part] = square[i];
      }
  }

  // Cache lines of the next tile that each of `num_groups` groups of tokens prefetches.
  int64_t lines_of_next(int64_t num_groups) const {
    return kTileOutputs * weight_OI_.width * int64_t(sizeof(bf16)) / kCacheLine / num_groups;
  }

  // The outputs of kTokens tokens. Meanwhile the group's part of the next tile is prefetched.
  template <int kTokens>
  void multiply(const Tokens& x_TI, int64_t first, const bf16* bias, const Outputs& y_TO,
                int64_t group, int64_t num_lines) const {
    const bf16* x[kTokens];
    for (int t = 0; t < kTokens; ++t) x[t] = x_TI.row(first + t);
    Floats sum[kTokens][2] = {};
    auto add = [&](int64_t i, int64_t length) {
      const Pairs* weight = &pairs_[2 * i];
      for (int t = 0; t < kTokens; ++t) {
        uint32_t pair = 0;
        std::memcpy(&pair, x[t] + 2 * i, length * sizeof(bf16));
        for (int part = 0; part < 2; ++part)
          sum[t][part] = multiply_add(weight[part], Pairs{} + pair, sum[t][part]);
      }
    };
    const char* next = (const char*)weight_OI_.row(output_ + kTileOutputs);
    next += group * num_lines * kCacheLine;
    int64_t width = x_TI.width, whole = width / 2, fetching = std::min(num_lines, whole);
    for (int64_t i = 0; i < fetching; ++i) {
      __builtin_prefetch(next + i * kCacheLine);
      add(i, 2);
    }
    for (int64_t i = fetching; i < whole; ++i) add(i, 2);
    if (width % 2) add(whole, 1);
    for (int t = 0; t < kTokens; ++t) write(sum[t], bias, y_TO.row(first + t));
  }

 private:
  void write(const Floats (&sum)[2], const bf16* bias, bf16* y) const {
    float sums[kTileOutputs];
    std::memcpy(sums, sum, sizeof(sum));
    int64_t num_outputs = std::min(kTileOutputs, weight_OI_.num_rows - output_);
    for (int64_t i = 0; i < num_outputs; ++i)
      put(y[output_ + i], bias ? sums[i] + get(bias[output_ + i]) : sums[i]);
  }

  Weight weight_OI_;
  int64_t num_squares_, output_ = 0;
  std::vector<Pairs> pairs_;
};

// The last group of tokens begins earlier if it would not be full: some outputs are computed twice.
template <int kTokens>
void multiply_tiles(const Tokens& x_TI, const Weight& weight_OI, const bf16* bias,
                    const Outputs& y_TO) {
  int64_t num_tokens = x_TI.num_rows, num_groups = (num_tokens + kTokens - 1) / kTokens;
  DividedLoop tiles((weight_OI.num_rows + kTileOutputs - 1) / kTileOutputs);
#pragma omp parallel if (weight_OI.numel() > kParallelWork)
  {
    Tile tile(weight_OI);
    int64_t num_lines = tile.lines_of_next(num_groups);
    for (int64_t i = tiles.next(); i >= 0; i = tiles.next()) {
      tile.read(i * kTileOutputs);
      for (int64_t g = 0; g < num_groups; ++g) {
        int64_t first = std::min(g * kTokens, num_tokens - kTokens);
        tile.multiply<kTokens>(x_TI, first, bias, y_TO, g, num_lines);
      }
    }
  }
}

constexpr int64_t kMaxTokens = kFloats == 16 ? 12 : 8;  // more are multiplied in tiles
constexpr int64_t kMaxTokensBesideUnit = 4;             // more are multiplied sooner by a matrix unit

// Functions for 1, 2, ... tokens.
template <int... kIndex>
constexpr auto functions(std::integer_sequence<int, kIndex...>) {
  return std::array{&multiply<kIndex + 1>...};
}
template <int... kIndex>
constexpr auto tile_functions(std::integer_sequence<int, kIndex...>) {
  return std::array{&multiply_tiles<kIndex + 1>...};
}

}  // namespace

// y = x @ weight.T + bias in bfloat16; a bias without elements is zero. Rows of a tensor may lie
// apart. In which order a sum is added up depends on the weight's size, and on whether there are
// more than kMaxTokensBesideUnit or kMaxTokens tokens, and on nothing else.
void linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  static constexpr auto kMultiply = functions(std::make_integer_sequence<int, kMaxTokens>());
  static constexpr auto kMultiplyTiles =
      tile_functions(std::make_integer_sequence<int, kMaxTileTokens>());
  int64_t num_tokens = x_TI.size(0);
  if (num_tokens < 1) TVM_FFI_THROW(ValueError) << "expected tokens, got none";
  const bf16* bias = bias_O.numel() ? row<const bf16>(bias_O, 0) : nullptr;
  if (num_tokens > kMaxTokensBesideUnit && matrix_unit_takes(weight_OI))
    return multiply_in_matrix_unit(x_TI, weight_OI, bias, y_TO);
  Tokens tokens(x_TI);
  Weight weight(weight_OI);
  Outputs outputs(y_TO);
  if (num_tokens <= kMaxTokens) return kMultiply[num_tokens - 1](tokens, weight, bias, outputs);
  int64_t num_groups = (num_tokens + kMaxTileTokens - 1) / kMaxTileTokens;
  int64_t size = (num_tokens + num_groups - 1) / num_groups;
  kMultiplyTiles[size - 1](tokens, weight, bias, outputs);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(matrix_unit_takes, matrix_unit_takes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_matrix_unit, has_matrix_unit);
