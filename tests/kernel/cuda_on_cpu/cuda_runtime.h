// Stands in for CUDA's header of this name, so that a C++ compiler makes gpu.cu a program of a CPU.
//
// The threads of a block run one after the other, each up to the next point where they meet. Who is first changes from
// one such point to the next, and so does the direction, which shows a meeting that is missing.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other, too

using std::max, std::min;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};

inline dim3 blockIdx, threadIdx;

inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int atomicAdd(int* x, int y) { return std::exchange(*x, *x + y); }
inline int atomicMin(int* x, int y) { return std::exchange(*x, std::min(*x, y)); }

namespace cuda_on_cpu {

inline ucontext_t scheduler;
inline std::vector<ucontext_t> threads;
inline std::vector<uint64_t> exchanged;
inline std::vector<char> is_done;
inline void (*body)(void*);
inline void* body_argument;

inline void run_thread() {
  body(body_argument);
  is_done[threadIdx.x] = true;
}

inline void meet() {
  unsigned mine = threadIdx.x;
  swapcontext(&threads[mine], &scheduler);
}

inline void run_block(unsigned size) {
  constexpr size_t kStack = 1 << 16;
  static std::vector<char> stacks;
  stacks.resize(size * kStack);
  threads.resize(size);
  exchanged.resize(size);
  is_done.assign(size, false);
  for (unsigned i = 0; i < size; ++i) {
    getcontext(&threads[i]);
    threads[i].uc_stack.ss_sp = &stacks[i * kStack];
    threads[i].uc_stack.ss_size = kStack;
    threads[i].uc_link = &scheduler;
    makecontext(&threads[i], run_thread, 0);
  }
  for (unsigned turn = 0; !std::all_of(is_done.begin(), is_done.end(), [](char x) { return x; }); ++turn) {
    for (unsigned i = 0; i < size; ++i) {
      unsigned now = threadIdx.x = ((turn % 2 ? i : size - 1 - i) + turn * 389) % size;
      if (!is_done[now]) swapcontext(&scheduler, &threads[now]);
    }
  }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::meet(); }

template <class T>
T __shfl_up_sync(unsigned, T x, int step) {
  unsigned mine = threadIdx.x;
  std::memcpy(&cuda_on_cpu::exchanged[mine], &x, sizeof x);
  cuda_on_cpu::meet();
  T other;
  std::memcpy(&other, &cuda_on_cpu::exchanged[mine % 32 >= unsigned(step) ? mine - step : mine], sizeof other);
  cuda_on_cpu::meet();
  return other;
}

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return ""; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  auto call = [&] { kernel(arguments...); };
  cuda_on_cpu::body_argument = &call;
  cuda_on_cpu::body = [](void* x) { (*static_cast<decltype(call)*>(x))(); };
  for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x) cuda_on_cpu::run_block(config->blockDim.x);
  return cudaSuccess;
}
