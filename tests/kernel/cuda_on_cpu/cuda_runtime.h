// Stands in for CUDA's header of this name, so that a C++ compiler builds csrc/*.cu for a CPU.
//
// One thread runs at a time, up to the next point where it waits for others: for its block, or, at
// the functions of warps, for its warp. The first thread and the direction change from one turn to
// the next, which reveals a missing synchronisation. A launch fails if threads that have to wait
// for each other stop at different points. Blocks run one after the other, or as control.cpp sets
// it. Launches run at once, or are put on streams, which stand for the ranks of a group: those then
// run beside each other, each its own launches in order.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))

// The linker's names for the ends of that section.
extern "C" char __start_shared_memory[], __stop_shared_memory[];

using std::max, std::min;

struct alignas(8) float2 {
  float x, y;
};

struct alignas(16) ulonglong2 {
  uint64_t x, y;
};

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

inline dim3 gridDim, blockIdx, threadIdx;

inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int atomicAdd(int* x, int y) { return std::exchange(*x, *x + y); }
inline int atomicMax(int* x, int y) { return std::exchange(*x, std::max(*x, y)); }
inline int atomicMin(int* x, int y) { return std::exchange(*x, std::min(*x, y)); }
inline void __threadfence() {}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t bytes = low | uint64_t(high) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

namespace cuda_on_cpu {

constexpr unsigned kWarp = 32, kFourWarps = 4 * kWarp;

// Where a thread waits for others; it runs on from `nowhere`. A warpgroup is four warps.
enum class Point : uint8_t {
  nowhere, cluster, block, warpgroup, warp, shuffle, vote, product, end
};

// Copies or products that a thread has begun and that go on in the background. They are done as late
// as they may be: when the thread waits for them.
struct Copies {
  std::deque<std::vector<std::function<void()>>> groups{1};  // the last one is still open

  void begin(std::function<void()> copy) { groups.back().push_back(std::move(copy)); }
  void close_group() { groups.emplace_back(); }

  void wait(size_t num_pending) {
    for (; groups.size() > num_pending + 1; groups.pop_front())
      for (const auto& copy : groups.front()) copy();
  }
};

struct Thread {
  unsigned block, index;
  unsigned turns_behind;
  bool has_begun, has_inputs;
  unsigned arrivals, waits;
  int barrier;  // of a warpgroup, at which it waits
  Copies copies, products;
  ucontext_t beginning;
  jmp_buf rest;
  // Of one function of the warp and the next: other lanes may still read what was offered before.
  struct alignas(16) {
    char bytes[48];
  } offers[2];
  unsigned num_offers;
};

// A launch: what each thread of it does, and the bytes of dynamic shared memory of a block.
struct Grid {
  unsigned num_blocks, block_size, cluster_size;
  size_t num_dynamic;
  std::function<void()> body;
};

// Whose shared memory lies in the section. It is exchanged when a thread of another block runs on.
inline std::vector<char>* has_section = nullptr;

inline void use_shared_memory(std::vector<char>* of_block) {
  if (has_section == of_block) return;
  if (has_section) std::copy(__start_shared_memory, __stop_shared_memory, has_section->begin());
  has_section = of_block;
  if (of_block) std::copy(of_block->begin(), of_block->end(), __start_shared_memory);
}

// Blocks of a grid that run at a time.
struct Running {
  const Grid* grid;
  std::vector<Thread> threads;
  std::vector<Point> points;  // where each of them is; each turn looks at all
  std::vector<char> stacks;
  std::vector<std::vector<char>> shared_of_block;
  std::vector<char> dynamic;  // of all blocks
  size_t turn;

  ~Running() { use_shared_memory(nullptr); }
};

inline const Grid* current_grid;
inline Running* current_running;
inline Thread* current;
inline jmp_buf scheduler;
inline const char* failure = nullptr;  // why the launch fails

// How many blocks run at once. With a seed they run in any order, and threads sometimes fall
// behind.
inline uint64_t seed = 0;
inline size_t num_together = 1;
inline unsigned most_behind_block = 1000;  // turns, of a thread
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

// Where the threads of this thread's block are.
inline Point* points_of_block() {
  return &current_running->points[current - threadIdx.x - current_running->threads.data()];
}

inline void set_point(Point at) { points_of_block()[threadIdx.x] = at; }

inline void run_thread() {
  current_grid->body();
  set_point(Point::end);
  _longjmp(scheduler, 1);
}

// Contexts are used to begin threads only: changing them takes a system call, and a jump takes
// none.
[[gnu::noinline]] inline void resume(Running& running, Thread& thread) {
  const Grid& grid = *running.grid;
  current_grid = &grid;
  current_running = &running;
  current = &thread;
  gridDim.x = grid.num_blocks;
  blockIdx.x = thread.block;
  threadIdx.x = thread.index;
  let_arrive(thread.has_inputs ? &LateInput::value : &LateInput::before);
  if (_setjmp(scheduler)) return;
  if (std::exchange(thread.has_begun, true)) _longjmp(thread.rest, 1);
  setcontext(&thread.beginning);
}

[[gnu::noinline]] inline void meet(Point at) {
  set_point(at);
  if (!_setjmp(current->rest)) _longjmp(scheduler, 1);
}

// Lets a block or warp go on if all of it are at the same point.
inline bool release(Running& running, size_t first, size_t num) {
  Point *points = &running.points[first], at = *points;
  if (at == Point::end || std::memcmp(points, points + 1, num - 1) != 0) return false;
  std::fill_n(points, num, Point::nowhere);
  unsigned most = at == Point::block ? most_behind_block : 1000;
  if (seed && random() % 4 == 0)
    running.threads[first + random() % num].turns_behind = random() % most;
  return true;
}

// Lets those threads of a cluster go on for whom all others have arrived.
inline bool release_from_cluster(Running& running, size_t first, size_t num) {
  Thread* cluster = &running.threads[first];
  Point* points = &running.points[first];
  if (!std::memchr(points, int(Point::cluster), num)) return false;
  unsigned fewest = ~0u;
  for (size_t i = 0; i < num; ++i)
    if (points[i] != Point::end) fewest = std::min(fewest, cluster[i].arrivals);
  bool any = false;
  for (size_t i = 0; i < num; ++i) {
    if (points[i] != Point::cluster || cluster[i].waits > fewest) continue;
    points[i] = Point::nowhere;
    any = true;
  }
  return any;
}

inline bool release_some(Running& running) {
  const std::vector<Point>& points = running.points;
  size_t block_size = running.grid->block_size;
  size_t cluster_size = block_size * running.grid->cluster_size;
  bool any = false;
  for (size_t i = 0; i < points.size(); i += kWarp)
    if (points[i] > Point::warpgroup) any |= release(running, i, kWarp);
  for (size_t i = 0; i < points.size(); i += block_size) {
    if (points[i] == Point::block) any |= release(running, i, block_size);
    for (size_t j = 0; j + kFourWarps <= block_size; j += kFourWarps)
      if (points[i + j] == Point::warpgroup) any |= release(running, i + j, kFourWarps);
  }
  for (size_t i = 0; i < points.size(); i += cluster_size)
    any |= release_from_cluster(running, i, cluster_size);
  return any;
}

inline void begin(Running& running, const Grid& grid, const unsigned* blocks, size_t num_blocks) {
  constexpr size_t kStack = (1 << 15) + 192;  // a power of two would put all in few lines of a cache
  if (grid.block_size % kWarp != 0)
    throw std::runtime_error("a block has to consist of whole warps");
  constexpr char kAnything = 0x7f;
  use_shared_memory(nullptr);
  size_t num_shared = static_cast<size_t>(__stop_shared_memory - __start_shared_memory);
  running.shared_of_block.assign(num_blocks, std::vector<char>(num_shared, kAnything));
  running.dynamic.assign(num_blocks * grid.num_dynamic, kAnything);
  running.grid = &grid;
  running.turn = 0;
  running.threads.resize(num_blocks * grid.block_size);
  running.points.assign(running.threads.size(), Point::nowhere);
  running.stacks.resize(std::max(running.stacks.size(), running.threads.size() * kStack));
  unsigned warp_behind = 0;
  for (size_t i = 0; i < running.threads.size(); ++i) {
    Thread& thread = running.threads[i];
    thread.block = blocks[i / grid.block_size];
    thread.index = static_cast<unsigned>(i % grid.block_size);
    if (i % kWarp == 0) warp_behind = seed && random() % 4 == 0 ? random() % 256 : 0;
    thread.turns_behind = warp_behind + (seed && random() % 32 == 0 ? random() % 64 : 0);
    thread.has_begun = thread.has_inputs = false;
    thread.arrivals = thread.waits = thread.num_offers = 0;
    thread.copies = {};
    thread.products = {};
    getcontext(&thread.beginning);
    thread.beginning.uc_stack.ss_sp = &running.stacks[i * kStack];
    thread.beginning.uc_stack.ss_size = kStack;
    makecontext(&thread.beginning, run_thread, 0);
  }
}

// Runs each thread to the next point where it waits; returns whether any could run.
inline bool take_turn(Running& running) {
  size_t num = running.threads.size(), turn = running.turn++;
  size_t step = turn % 2 ? 1 : num - 1, place = (turn * 389 + num - step) % num;
  bool any_runs = false;
  for (size_t i = 0; i < num; ++i) {
    place += step;
    if (place >= num) place -= num;
    if (running.points[place] != Point::nowhere) continue;
    any_runs = true;
    Thread& thread = running.threads[place];
    if (thread.turns_behind > 0) {
      --thread.turns_behind;
      continue;
    }
    use_shared_memory(&running.shared_of_block[place / running.grid->block_size]);
    resume(running, thread);
  }
  any_runs |= release_some(running);
  if (const char* reason = std::exchange(failure, nullptr)) throw std::runtime_error(reason);
  if (any_runs) return true;
  for (Point at : running.points)
    if (at != Point::end)
      throw std::runtime_error("threads that have to meet are at different points");
  return false;
}

inline void run_blocks(const Grid& grid, const unsigned* blocks, size_t num_blocks) {
  static Running running;
  begin(running, grid, blocks, num_blocks);
  let_arrive(&LateInput::before);
  while (take_turn(running)) {
  }
}

// The blocks of a grid; in any order if there is a seed, but those of a cluster side by side.
inline std::vector<unsigned> blocks_of(const Grid& grid) {
  std::vector<unsigned> clusters(grid.num_blocks / grid.cluster_size), blocks;
  std::iota(clusters.begin(), clusters.end(), 0);
  if (seed) std::shuffle(clusters.begin(), clusters.end(), random);
  for (unsigned cluster : clusters)
    for (unsigned i = 0; i < grid.cluster_size; ++i)
      blocks.push_back(cluster * grid.cluster_size + i);
  return blocks;
}

inline void run_grid(const Grid& grid) {
  random.seed(seed);
  std::vector<unsigned> blocks = blocks_of(grid);
  size_t step = num_together * grid.cluster_size;
  for (size_t i = 0; i < blocks.size(); i += step)
    run_blocks(grid, &blocks[i], std::min(step, blocks.size() - i));
}

// Which of the running blocks a thread is in.
inline size_t running_block() {
  return static_cast<size_t>(current - current_running->threads.data()) / current_grid->block_size;
}

// The dynamic shared memory of one of the running blocks.
inline char* dynamic_of(size_t running_block) {
  return current_running->dynamic.data() + running_block * current_grid->num_dynamic;
}

// The block whose dynamic shared memory has a place.
inline size_t block_at(const void* place) {
  auto byte = static_cast<size_t>(static_cast<const char*>(place) - current_running->dynamic.data());
  return byte / current_grid->num_dynamic;
}

inline void check_that_block_runs(const void* place) {
  size_t size = current_grid->block_size;
  auto points = current_running->points.begin() + ptrdiff_t(block_at(place) * size);
  if (std::all_of(points, points + ptrdiff_t(size), [](Point at) { return at == Point::end; }))
    failure = "a block that a copy or an arrival needs has ended";
}

inline size_t block_of_cluster(int block) {
  unsigned size = current_grid->cluster_size;
  if (!current->waits) failure = "a store to a block of the cluster that may not have begun";
  return running_block() / size * size + static_cast<size_t>(block);
}

// The same place of dynamic shared memory in a block of this thread's cluster.
template <class T>
T* place_in_cluster(T* place, int block) {
  size_t other = block_of_cluster(block);
  auto offset = reinterpret_cast<char*>(place) - dynamic_of(running_block());
  char* in_other = dynamic_of(other) + offset;
  check_that_block_runs(in_other);
  return reinterpret_cast<T*>(in_other);
}

// Stores to the same place of shared memory in a block of this thread's cluster.
template <class T>
void store_in_cluster(T* place, const T& x, int block) {
  auto bytes = reinterpret_cast<char*>(place);
  if (bytes >= __start_shared_memory && bytes < __stop_shared_memory) {
    auto& shared = current_running->shared_of_block[block_of_cluster(block)];
    char* to = has_section == &shared ? __start_shared_memory : shared.data();
    std::memcpy(to + (bytes - __start_shared_memory), &x, sizeof x);
  } else {
    *place_in_cluster(place, block) = x;
  }
}

// What waits on each stream, and the stream of the next launch; without one, launches run at once.
inline std::vector<std::deque<Grid>> streams;
inline std::deque<Grid>* current_stream = nullptr;

// Runs all streams to their ends. One of them is now and then far ahead of the others.
inline void run_streams() {
  struct Stream {
    std::deque<Grid> grids;
    Running running;
    size_t turns_behind;
  };
  std::vector<Stream> waiting(streams.size());
  for (size_t i = 0; i < streams.size(); ++i) waiting[i].grids = std::move(streams[i]);
  streams.clear();
  current_stream = nullptr;
  auto begin_next = [](Stream& stream) {
    const Grid& grid = stream.grids.front();
    std::vector<unsigned> blocks = blocks_of(grid);
    begin(stream.running, grid, blocks.data(), blocks.size());
  };
  random.seed(seed);
  for (Stream& stream : waiting)
    if (!stream.grids.empty()) begin_next(stream);
  for (bool any_runs = true; any_runs;) {
    any_runs = false;
    for (Stream& stream : waiting) {
      if (stream.grids.empty()) continue;
      any_runs = true;
      if (stream.turns_behind > 0) {
        --stream.turns_behind;
        continue;
      }
      if (seed && random() % 16 == 0) stream.turns_behind = random() % 64;
      if (take_turn(stream.running)) continue;
      stream.grids.pop_front();
      if (!stream.grids.empty()) begin_next(stream);
    }
  }
}

// Calls `read` on the values of this thread's warp, with a function from a lane to that lane's
// value.
template <class T, class Read>
auto with_warp(Point at, const T& mine, Read read) {
  unsigned which = current->num_offers++ % 2;
  static_assert(sizeof mine <= sizeof current->offers[which].bytes);
  std::memcpy(current->offers[which].bytes, &mine, sizeof mine);
  meet(at);
  const Thread* warp = current - threadIdx.x % kWarp;
  return read([&](unsigned lane) -> const T& {
    return reinterpret_cast<const T&>(warp[lane].offers[which].bytes);
  });
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

struct cudaLaunchAttribute {
  unsigned cluster_size = 0;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  auto body = [=] { kernel(arguments...); };
  unsigned cluster_size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    cluster_size = max(cluster_size, config->attrs[i].cluster_size);
  if (config->gridDim.x % cluster_size != 0)
    throw std::runtime_error("a grid has to consist of whole clusters");
  // Places that are aligned in one block of a cluster are so in the others.
  size_t num_dynamic = (config->dynamicSmemBytes + 1023) / 1024 * 1024;
  cuda_on_cpu::Grid grid{config->gridDim.x, config->blockDim.x, cluster_size, num_dynamic, body};
  if (cuda_on_cpu::current_stream) cuda_on_cpu::current_stream->push_back(grid);
  else cuda_on_cpu::run_grid(grid);
  return cudaSuccess;
}
