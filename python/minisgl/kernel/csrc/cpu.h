// What the kernels of a CPU share: bfloat16, rows of tensors, and when threads are worth their cost.

#pragma once

#include <tvm/ffi/container/tensor.h>

#include <bit>
#include <cstdint>

namespace {

using tvm::ffi::TensorView;

using bf16 = uint16_t;  // its bits; a plain integer, so that loops over it become vectors

inline float get(float x) { return x; }
inline float get(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
inline void put(float& y, float x) { y = x; }
inline void put(bf16& y, float x) {  // to nearest, ties to even
  uint32_t u = std::bit_cast<uint32_t>(x);
  y = static_cast<bf16>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Elements below which waking another thread costs more than it gains.
constexpr int64_t kParallelWork = 1 << 14;

template <class T>
T* row(const TensorView& x, int64_t i) {
  return static_cast<T*>(x.data_ptr()) + i * x.stride(0);
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

}  // namespace
