// The product of a few tokens with a bfloat16 weight, bound by reading the weight once.
//
// A vector holds pairs of neighbours in a row.
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

#include "cpu.h"

namespace {

constexpr int kInputs = 2 * kFloats;  // of a vector of pairs

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
    for (int r = 0; r < kRows; ++r) w[r] = load(weight[r] + i, length);
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

// Rows side by side share the loads of x. They lie half a weight apart, since processors prefetch
// streams that are far from each other, and not neighbours in a page: those take twice as long.
template <int kTokens>
void multiply(const TensorView& x_TI, const TensorView& weight_OI, const bf16* bias,
              const TensorView& y_TO) {
  constexpr int kRows = kTokens > 2 ? 2 : 1;
  int64_t num_outputs = weight_OI.size(0), stride = num_outputs / kRows;
#pragma omp parallel for schedule(static) if (weight_OI.numel() > kParallelWork)
  for (int64_t o = 0; o < stride; ++o)
    multiply_rows<kRows, kTokens>(x_TI, weight_OI, bias, y_TO, o, stride);
  for (int64_t o = stride * kRows; o < num_outputs; ++o)
    multiply_rows<1, kTokens>(x_TI, weight_OI, bias, y_TO, o, 0);
}

constexpr int64_t kMaxTokens = 8;

// Functions for 1, 2, ... tokens.
template <int... kIndex>
constexpr auto functions(std::integer_sequence<int, kIndex...>) {
  return std::array{&multiply<kIndex + 1>...};
}

}  // namespace

// y = x @ weight.T + bias for a few tokens, in bfloat16; a bias without elements is zero. Rows of a
// tensor may lie apart.
void few_token_linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  static constexpr auto kMultiply = functions(std::make_integer_sequence<int, kMaxTokens>());
  int64_t num_tokens = x_TI.size(0);
  if (num_tokens < 1 || num_tokens > kMaxTokens)
    TVM_FFI_THROW(ValueError) << "expected 1 to " << kMaxTokens << " tokens, got " << num_tokens;
  const bf16* bias = bias_O.numel() ? row<const bf16>(bias_O, 0) : nullptr;
  kMultiply[num_tokens - 1](x_TI, weight_OI, bias, y_TO);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_token_linear, few_token_linear);
