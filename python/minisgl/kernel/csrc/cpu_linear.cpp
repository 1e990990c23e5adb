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
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu.h"
#include "cpu_unit_linear.h"
#include "divided_loop.h"
#include "transpose.h"

namespace {

constexpr int kInputs = 2 * kFloats;  // inputs in a vector of pairs

// Up to kInputs elements, then zeros.
inline Pairs load(const bf16* x, int64_t length = kInputs) {
  Pairs pairs{};
  std::memcpy(&pairs, x, length * sizeof(bf16));
  return pairs;
}

template <int N>
inline float total(typename Vector<N>::Floats x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    typename Vector<N / 2>::Floats halves[2];
    std::memcpy(halves, &x, sizeof(x));
    return total<N / 2>(halves[0] + halves[1]);
  }
}

// Prefetch what is a memory page further on. A processor with a matrix unit then reads 35 GB/s
// instead of 28 (two cores of an Intel Xeon). Others were not measured.
inline void fetch_ahead(const bf16* weight) {
#ifdef MINISGL_HAS_MATRIX_UNIT
  __builtin_prefetch(weight + 4096 / sizeof(bf16), 0, 2);
#endif
}

// Outputs o, o + stride, ... for all tokens: kRows rows of the weight side by side.
template <int kRows, int kTokens>
void multiply_rows(const TensorView& x_TI, const TensorView& weight_OI, const bf16* bias,
                   const TensorView& y_TO, int64_t o, int64_t stride) {
  int64_t width = weight_OI.size(1), whole = width / kInputs * kInputs;
  const bf16 *weight[kRows], *x[kTokens];
  for (int r = 0; r < kRows; ++r) weight[r] = row<const bf16>(weight_OI, o + r * stride);
  for (int t = 0; t < kTokens; ++t) x[t] = row<const bf16>(x_TI, t);
  Floats sum[kRows][kTokens] = {};
  auto add = [&](int64_t i, int64_t length) {
    Pairs w[kRows];
    for (int r = 0; r < kRows; ++r) {
      w[r] = load(weight[r] + i, length);
      fetch_ahead(weight[r] + i);
    }
    for (int t = 0; t < kTokens; ++t) {
      Pairs pairs = load(x[t] + i, length);
      for (int r = 0; r < kRows; ++r) sum[r][t] = multiply_add(w[r], pairs, sum[r][t]);
    }
  };
  for (int64_t i = 0; i < whole; i += kInputs) add(i, kInputs);
  if (whole < width) add(whole, width - whole);
  for (int r = 0; r < kRows; ++r) {
    int64_t output = o + r * stride;
    for (int t = 0; t < kTokens; ++t) {
      float y = total<kFloats>(sum[r][t]);
      put(row<bf16>(y_TO, t)[output], bias ? y + get(bias[output]) : y);
    }
  }
}

// Rows that are multiplied together share the loads of x. They are half a weight apart, since a
// processor prefetches streams that are far apart, but not two in one page: that takes twice as
// long.
template <int kTokens>
void multiply(const TensorView& x_TI, const TensorView& weight_OI, const bf16* bias,
              const TensorView& y_TO) {
  constexpr int kRows = 2;
  int64_t num_outputs = weight_OI.size(0), stride = num_outputs / kRows;
#pragma omp parallel for schedule(static) if (weight_OI.numel() > kParallelWork)
  for (int64_t o = 0; o < stride; ++o)
    multiply_rows<kRows, kTokens>(x_TI, weight_OI, bias, y_TO, o, stride);
  for (int64_t o = stride * kRows; o < num_outputs; ++o)
    multiply_rows<1, kTokens>(x_TI, weight_OI, bias, y_TO, o, 0);
}

constexpr int64_t kTileOutputs = 2 * kFloats;  // two vectors of outputs
constexpr int64_t kMaxTileTokens = kFloats == 16 ? 12 : 5;  // tokens whose sums fit the registers
constexpr int64_t kCacheLine = 64;

// The weights of kTileOutputs outputs; those after the last output repeat it. The pairs of all
// outputs for the same two inputs lie side by side. Zeros follow the last input.
class Tile {
 public:
  explicit Tile(const TensorView& weight_OI)
      : weight_OI_(weight_OI),
        num_squares_((weight_OI.size(1) + kInputs - 1) / kInputs),
        pairs_(2 * kFloats * num_squares_) {}

  void read(int64_t output) {
    output_ = output;
    int64_t width = weight_OI_.size(1), last = weight_OI_.size(0) - 1;
    for (int part = 0; part < 2; ++part)
      for (int64_t s = 0; s < num_squares_; ++s) {
        Pairs square[kFloats];
        int64_t length = std::min<int64_t>(kInputs, width - s * kInputs);
        for (int r = 0; r < kFloats; ++r) {
          int64_t o = std::min(output + part * kFloats + r, last);
          const bf16* weight = row<const bf16>(weight_OI_, o) + s * kInputs;
          square[r] = length == kInputs ? load(weight) : load(weight, length);
        }
        transpose(square);
        for (int i = 0; i < kFloats; ++i) pairs_[2 * (s * kFloats + i) + part] = square[i];
      }
  }

  // Cache lines of the next tile that each of `num_groups` groups of tokens prefetches.
  int64_t lines_of_next(int64_t num_groups) const {
    return kTileOutputs * weight_OI_.size(1) * int64_t(sizeof(bf16)) / kCacheLine / num_groups;
  }

  // The outputs of kTokens tokens. Meanwhile the group's part of the next tile is prefetched.
  template <int kTokens>
  void multiply(const TensorView& x_TI, int64_t first, const bf16* bias, const TensorView& y_TO,
                int64_t group, int64_t num_lines) const {
    const bf16* x[kTokens];
    for (int t = 0; t < kTokens; ++t) x[t] = row<const bf16>(x_TI, first + t);
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
    const char* next = (const char*)row<const bf16>(weight_OI_, output_ + kTileOutputs);
    next += group * num_lines * kCacheLine;
    int64_t width = x_TI.size(1), whole = width / 2, fetching = std::min(num_lines, whole);
    for (int64_t i = 0; i < fetching; ++i) {
      __builtin_prefetch(next + i * kCacheLine);
      add(i, 2);
    }
    for (int64_t i = fetching; i < whole; ++i) add(i, 2);
    if (width % 2) add(whole, 1);
    for (int t = 0; t < kTokens; ++t) write(sum[t], bias, row<bf16>(y_TO, first + t));
  }

 private:
  void write(const Floats (&sum)[2], const bf16* bias, bf16* y) const {
    float sums[kTileOutputs];
    std::memcpy(sums, sum, sizeof(sum));
    int64_t num_outputs = std::min(kTileOutputs, weight_OI_.size(0) - output_);
    for (int64_t i = 0; i < num_outputs; ++i)
      put(y[output_ + i], bias ? sums[i] + get(bias[output_ + i]) : sums[i]);
  }

  const TensorView& weight_OI_;
  int64_t num_squares_, output_ = 0;
  std::vector<Pairs> pairs_;
};

// The last group of tokens begins earlier if it would not be full: some outputs are computed twice.
template <int kTokens>
void multiply_tiles(const TensorView& x_TI, const TensorView& weight_OI, const bf16* bias,
                    const TensorView& y_TO) {
  int64_t num_tokens = x_TI.size(0), num_groups = (num_tokens + kTokens - 1) / kTokens;
  DividedLoop tiles((weight_OI.size(0) + kTileOutputs - 1) / kTileOutputs);
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

constexpr int64_t kMaxTokens = 8;            // more are multiplied in tiles
constexpr int64_t kMaxTokensBesideUnit = 4;  // more are multiplied sooner by a matrix unit

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
  if (num_tokens <= kMaxTokens) return kMultiply[num_tokens - 1](x_TI, weight_OI, bias, y_TO);
  int64_t num_groups = (num_tokens + kMaxTileTokens - 1) / kMaxTileTokens;
  int64_t size = (num_tokens + num_groups - 1) / num_groups;
  kMultiplyTiles[size - 1](x_TI, weight_OI, bias, y_TO);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(matrix_unit_takes, matrix_unit_takes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_matrix_unit, has_matrix_unit);
