// The common part of the kernels of a CPU: bfloat16, vectors, rows of tensors, and when threads are
// worth their cost.
//
// Dimensions: H head width, K kv heads, P pages, Q positions of a page, Z entries of a flat list.

#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using tvm::ffi::TensorView;

using bf16 = uint16_t;  // its bits; a plain integer, so that loops over it are vectorized

inline float get(float x) { return x; }
inline float get(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
inline void put(float& y, float x) { y = x; }
inline void put(bf16& y, float x) {  // to nearest, ties to even
  uint32_t u = std::bit_cast<uint32_t>(x);
  y = static_cast<bf16>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// exp for x <= 0, with a relative error below 1e-5, in operations that a compiler vectorizes.
inline float exp_nonpositive(float x) {
  float t = std::max(x * 1.44269504f, -126.0f), n = std::nearbyint(t), r = t - n;  // 2^n * 2^r
  float p = 1.33390381e-3f;
  p = p * r + 9.61817e-3f;
  p = p * r + 5.55033e-2f;
  p = p * r + 2.40226511e-1f;
  p = p * r + 6.93147182e-1f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

#if defined(__AVX512F__)
constexpr int kFloats = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif

template <int N>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * N)));
};
using Floats = Vector<kFloats>::Floats;
typedef uint32_t Pairs __attribute__((vector_size(4 * kFloats)));
typedef int32_t Ints __attribute__((vector_size(4 * kFloats)));

// Each lane rounded to bfloat16, to nearest, ties to even; it is in the upper half of its lane.
inline Pairs rounded(Floats x) {
  Pairs bits = (Pairs)x;
  return (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
}

// exp for each lane, x <= 0, but at least 2^-125.
inline Floats exp_nonpositive(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the low bits of a sum with it are an integer
  Floats t = x * 1.44269504f;
  t = t < -125.0f ? Floats{} - 125.0f : t;
  Floats n = t + kRound, r = t - (n - kRound);
  Floats p = Floats{} + 1.33390381e-3f;
  p = p * r + 9.61817e-3f;
  p = p * r + 5.55033e-2f;
  p = p * r + 2.40226511e-1f;
  p = p * r + 6.93147182e-1f;
  p = p * r + 1.0f;
  return (Floats)((Pairs)p + ((Pairs)n << 23));
}

// Adds the products of both halves of each pair, so it does not matter which is the upper one.
inline Floats multiply_add(Pairs w, Pairs x, Floats sum) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
  sum += (Floats)(w << 16) * (Floats)(x << 16);
  return sum + (Floats)(w & 0xffff0000) * (Floats)(x & 0xffff0000);
#endif
}

inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// With fewer elements, waking another thread costs more than it gains.
constexpr int64_t kParallelWork = 1 << 14;

// `strides()` may be inlined; `stride`, which may throw an error with a message, is a call.
template <class T>
T* row(const TensorView& x, int64_t i) {
  return static_cast<T*>(x.data_ptr()) + i * x.strides()[0];
}

// A matrix whose rows may lie apart. `row` of a tensor may be a call, this one is not.
template <class T>
struct Matrix {
  T* data;
  int64_t stride, num_rows, width;

  explicit Matrix(const TensorView& x)
      : data(static_cast<T*>(x.data_ptr())),
        stride(x.stride(0)),
        num_rows(x.size(0)),
        width(x.size(1)) {}

  T* row(int64_t i) const { return data + i * stride; }
  int64_t numel() const { return num_rows * width; }
};

// The keys, or the values, of all sequences: pages [P, Q, K, H] with any strides; stride(3) is 1.
struct Pages {
  void* data;
  int64_t size;  // positions of a page
  int64_t stride, position_stride, head_stride;

  explicit Pages(const TensorView& x_PQKH)
      : data(x_PQKH.data_ptr()),
        size(x_PQKH.size(1)),
        stride(x_PQKH.stride(0)),
        position_stride(x_PQKH.stride(1)),
        head_stride(x_PQKH.stride(2)) {}

  template <class T>
  T* at(int64_t page, int64_t position, int64_t head) const {
    return static_cast<T*>(data) + page * stride + position * position_stride + head * head_stride;
  }
};

// An element of a list of any stride.
template <class T>
T& item(const TensorView& x_Z, int64_t i) {
  return *row<T>(x_Z, i);
}

// A list of integers of 32 or 64 bits.
class Integers {
 public:
  explicit Integers(const TensorView& x) : data_(x.data_ptr()), is_wide_(x.dtype().bits == 64) {}

  int64_t operator[](int64_t i) const {
    if (is_wide_) return static_cast<const int64_t*>(data_)[i];
    return static_cast<const int32_t*>(data_)[i];
  }

 private:
  const void* data_;
  bool is_wide_;
};

// Call f with the width as a constant if it is a common one, so that loops over it unroll.
template <class F>
void for_width(int64_t width, F f) {
  if (width == 64) return f(std::integral_constant<int64_t, 64>{});
  if (width == 128) return f(std::integral_constant<int64_t, 128>{});
  f(width);
}

// Call f with a value of the tensors' element type.
template <class F>
void for_dtype(const TensorView& x, F f) {
  DLDataType dtype = x.dtype();
  if (dtype.code == kDLBfloat && dtype.bits == 16) return f(bf16{});
  if (dtype.code == kDLFloat && dtype.bits == 32) return f(float{});
  TVM_FFI_THROW(TypeError) << "expected bfloat16 or float32";
}

}  // namespace
