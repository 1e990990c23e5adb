// Instructions that C++ has no name for.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

struct Bfloat16 {};
struct Float16 {};

struct Fragment4 {
  uint32_t x, y, z, w;
};

struct Fragment2 {
  uint32_t x, y;
};

// sum += a b, of 16 x 16 and 16 x 8 numbers that the threads of a warp hold together (PTX ISA, mma.m16n8k16).
template <class T>
__device__ void multiply(float (&sum)[4], Fragment4 a, Fragment2 b);

#define MULTIPLY(T, name)                                                                                        \
  template <>                                                                                                    \
  __device__ inline void multiply<T>(float(&sum)[4], Fragment4 a, Fragment2 b) {                                 \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "     \
        "{%0,%1,%2,%3};"                                                                                         \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                 \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));                                           \
  }

MULTIPLY(Bfloat16, "bf16")
MULTIPLY(Float16, "f16")
#undef MULTIPLY

// Two numbers in a word, the first in its low half.
template <class T>
__device__ uint32_t pack(float low, float high);

template <>
__device__ inline uint32_t pack<Bfloat16>(float low, float high) {
  __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t&>(x);
}

template <>
__device__ inline uint32_t pack<Float16>(float low, float high) {
  __half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<uint32_t&>(x);
}

// 16 bytes, asked for here and not where the compiler would like to.
__device__ inline uint4 load_now(const uint16_t* place) {
  uint4 x;
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(place));
  return x;
}

// What another processor of the device may just have written.
template <class T>
__device__ T load_fresh(const T* place) {
  return __ldcg(place);
}

// Programmatic dependent launch, as in gpu/launch.py: a kernel waits for the one before it before it reads anything.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline cudaLaunchAttribute may_start_early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}
