// Stands in for CUDA's header of this name, so that a C++ compiler builds csrc/*.cu for a CPU.
//
// One thread runs at a time, up to the next point where it waits for others: for its block, or, at
// the functions of warps, for its warp. The first thread and the direction change from one turn to
// the next, which reveals a missing synchronisation. A launch fails if threads that have to wait
// for each other stop at different points. Blocks run one after the other, or as control.cpp sets
// it.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // blocks with such memory must not run together

using std::max, std::min;

struct alignas(8) int2 {
  int x, y;
};

struct alignas(16) int4 {
  int x, y, z, w;
};

struct alignas(8) uint2 {
  uint32_t x, y;
};

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};

inline dim3 blockIdx, threadIdx;

inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int atomicAdd(int* x, int y) { return std::exchange(*x, *x + y); }
inline int atomicMin(int* x, int y) { return std::exchange(*x, std::min(*x, y)); }
inline void __threadfence() {}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t bytes = low | uint64_t(high) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

namespace cuda_on_cpu {

constexpr unsigned kWarp = 32;

// Where a thread waits for others; it runs on from `nowhere`.
enum class Point { nowhere, block, warp, shuffle, vote, product, end };

struct Thread {
  unsigned block, index;
  Point at;
  unsigned turns_behind;
  bool has_begun;
  ucontext_t beginning;
  jmp_buf rest;
  alignas(16) char offer[32];
};

inline std::vector<Thread> threads;
inline Thread* current;
inline jmp_buf scheduler;
inline void (*body)(void*);
inline void* body_argument;

// How many blocks run at once. With a seed they run in any order, and threads sometimes fall
// behind.
inline uint64_t seed = 0;
inline size_t num_together = 1;
inline std::mt19937_64 random;

// Inputs that the kernel before still writes: they hold their value once a thread of a block has
// waited for that kernel.
struct LateInput {
  char* place;
  std::vector<char> value, before;
};

inline std::vector<LateInput> late_inputs;

inline void let_arrive(std::vector<char> LateInput::* bytes) {
  for (LateInput& it : late_inputs) std::memcpy(it.place, (it.*bytes).data(), it.value.size());
}

inline void run_thread() {
  body(body_argument);
  current->at = Point::end;
  _longjmp(scheduler, 1);
}

// Contexts are used to begin threads only: changing them takes a system call, and a jump takes
// none.
[[gnu::noinline]] inline void resume(Thread& thread) {
  current = &thread;
  blockIdx.x = thread.block;
  threadIdx.x = thread.index;
  if (_setjmp(scheduler)) return;
  if (std::exchange(thread.has_begun, true)) _longjmp(thread.rest, 1);
  setcontext(&thread.beginning);
}

[[gnu::noinline]] inline void meet(Point at) {
  current->at = at;
  if (!_setjmp(current->rest)) _longjmp(scheduler, 1);
}

// Lets a block or warp go on if all of it are at the same point.
inline bool release(size_t first, size_t num) {
  Thread* warp_or_block = &threads[first];
  Point at = warp_or_block->at;
  if (at == Point::end) return false;
  for (size_t i = 0; i < num; ++i)
    if (warp_or_block[i].at != at) return false;
  for (size_t i = 0; i < num; ++i) warp_or_block[i].at = Point::nowhere;
  if (seed && random() % 8 == 0) warp_or_block[random() % num].turns_behind = random() % 1000;
  return true;
}

inline bool release_some(size_t block_size) {
  bool any = false;
  for (size_t i = 0; i < threads.size(); i += kWarp)
    if (threads[i].at != Point::block) any |= release(i, kWarp);
  for (size_t i = 0; i < threads.size(); i += block_size)
    if (threads[i].at == Point::block) any |= release(i, block_size);
  return any;
}

inline void run_blocks(const unsigned* blocks, size_t num_blocks, unsigned block_size) {
  constexpr size_t kStack = 1 << 15;
  static std::vector<char> stacks;
  if (block_size % kWarp != 0) throw std::runtime_error("a block has to consist of whole warps");
  threads.resize(num_blocks * block_size);
  stacks.resize(std::max(stacks.size(), threads.size() * kStack));
  for (size_t i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    thread.block = blocks[i / block_size];
    thread.index = static_cast<unsigned>(i % block_size);
    thread.at = Point::nowhere;
    thread.turns_behind = 0;
    thread.has_begun = false;
    getcontext(&thread.beginning);
    thread.beginning.uc_stack.ss_sp = &stacks[i * kStack];
    thread.beginning.uc_stack.ss_size = kStack;
    makecontext(&thread.beginning, run_thread, 0);
  }
  let_arrive(&LateInput::before);
  bool any_runs = true;
  for (size_t turn = 0, num = threads.size(); any_runs; ++turn) {
    any_runs = false;
    for (size_t i = 0; i < num; ++i) {
      Thread& thread = threads[((turn % 2 ? i : num - 1 - i) + turn * 389) % num];
      if (thread.at != Point::nowhere) continue;
      any_runs = true;
      if (thread.turns_behind == 0) resume(thread);
      else --thread.turns_behind;
    }
    any_runs |= release_some(block_size);
  }
  for (const Thread& thread : threads)
    if (thread.at != Point::end)
      throw std::runtime_error("threads that have to meet are at different points");
}

inline void run_grid(unsigned num_blocks, unsigned block_size) {
  std::vector<unsigned> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  random.seed(seed);
  if (seed) std::shuffle(blocks.begin(), blocks.end(), random);
  for (size_t i = 0; i < num_blocks; i += num_together)
    run_blocks(&blocks[i], std::min(num_together, num_blocks - i), block_size);
}

// Calls `read` on the values of this thread's warp, with a function from a lane to that lane's
// value.
template <class T, class Read>
auto with_warp(Point at, const T& mine, Read read) {
  static_assert(sizeof mine <= sizeof current->offer);
  std::memcpy(current->offer, &mine, sizeof mine);
  meet(at);
  const Thread* warp = current - threadIdx.x % kWarp;
  auto result = read([&](unsigned lane) -> const T& {
    return reinterpret_cast<const T&>(warp[lane].offer);
  });
  meet(at);
  return result;
}

inline unsigned lane() { return threadIdx.x % kWarp; }

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::meet(cuda_on_cpu::Point::block); }
inline void __syncwarp() { cuda_on_cpu::meet(cuda_on_cpu::Point::warp); }

template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  auto read = [&](auto of_lane) { return of_lane(unsigned(lane) % cuda_on_cpu::kWarp); };
  return cuda_on_cpu::with_warp(cuda_on_cpu::Point::shuffle, x, read);
}

template <class T>
T __shfl_up_sync(unsigned mask, T x, int step) {
  int lane = int(cuda_on_cpu::lane());
  return __shfl_sync(mask, x, lane >= step ? lane - step : lane);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits) {
  return __shfl_sync(mask, x, int(cuda_on_cpu::lane()) ^ bits);
}

inline int __any_sync(unsigned, int x) {
  auto read = [](auto of_lane) {
    bool any = false;
    for (unsigned i = 0; i < cuda_on_cpu::kWarp; ++i) any |= of_lane(i) != 0;
    return int(any);
  };
  return cuda_on_cpu::with_warp(cuda_on_cpu::Point::vote, x, read);
}

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return ""; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

struct cudaLaunchAttribute {};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  auto call = [&] { kernel(arguments...); };
  cuda_on_cpu::body_argument = &call;
  cuda_on_cpu::body = [](void* x) { (*static_cast<decltype(call)*>(x))(); };
  cuda_on_cpu::run_grid(config->gridDim.x, config->blockDim.x);
  return cudaSuccess;
}
