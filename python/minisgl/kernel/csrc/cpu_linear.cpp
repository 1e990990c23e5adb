// The product of a few tokens with a bfloat16 weight, bound by reading the weight once.
//
// A vector holds pairs of neighbours in a row, as 32-bit integers. The products of both are added to
// one float32 sum, so it does not matter which of them is the upper half.
//
// Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kFloats = 16;  // of a vector
#elif defined(__AVX__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
constexpr int kInputs = 2 * kFloats;  // of a vector of pairs

template <int N>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * N)));
};
using Floats = Vector<kFloats>::Floats;
typedef uint32_t Pairs __attribute__((vector_size(4 * kFloats)));

// Up to kInputs elements, then zeros.
inline Pairs load(const bf16* x, int64_t length = kInputs) {
  Pairs pairs{};
  std::memcpy(&pairs, x, length * sizeof(bf16));
  return pairs;
}

inline Floats multiply_add(Pairs w, Pairs x, Floats sum) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
  sum += (Floats)(w << 16) * (Floats)(x << 16);
  return sum + (Floats)(w & 0xffff0000) * (Floats)(x & 0xffff0000);
#endif
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

// One row of the weight after the other: a single stream is what processors prefetch best. Four
// rows side by side take more than twice as long.
template <int kTokens>
void multiply(const TensorView& x_TI, const TensorView& weight_OI, const bf16* bias,
              const TensorView& y_TO) {
  int64_t width = weight_OI.size(1), whole = width / kInputs * kInputs;
#pragma omp parallel for schedule(static) if (weight_OI.numel() > kParallelWork)
  for (int64_t o = 0; o < weight_OI.size(0); ++o) {
    const bf16* weight = row<const bf16>(weight_OI, o);
    Floats sum[kTokens] = {};
    auto add = [&](int64_t i, int64_t length) {
      Pairs w = load(weight + i, length);
      for (int t = 0; t < kTokens; ++t)
        sum[t] = multiply_add(w, load(row<const bf16>(x_TI, t) + i, length), sum[t]);
    };
    for (int64_t i = 0; i < whole; i += kInputs) add(i, kInputs);
    if (whole < width) add(whole, width - whole);
    for (int t = 0; t < kTokens; ++t) {
      float y = total<kFloats>(sum[t]);
      put(row<bf16>(y_TO, t)[o], bias ? y + get(bias[o]) : y);
    }
  }
}

}  // namespace

// y = x @ weight.T + bias for one to four tokens, in bfloat16; a bias without elements is zero.
// Rows of a tensor may lie apart.
void few_token_linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  const bf16* bias = bias_O.numel() ? row<const bf16>(bias_O, 0) : nullptr;
  switch (x_TI.size(0)) {
    case 1:
      return multiply<1>(x_TI, weight_OI, bias, y_TO);
    case 2:
      return multiply<2>(x_TI, weight_OI, bias, y_TO);
    case 3:
      return multiply<3>(x_TI, weight_OI, bias, y_TO);
    case 4:
      return multiply<4>(x_TI, weight_OI, bias, y_TO);
  }
  TVM_FFI_THROW(ValueError) << "expected 1 to 4 tokens, got " << x_TI.size(0);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_token_linear, few_token_linear);
