// Stands in for csrc/ptx.cuh: the same functions, as the PTX ISA describes the instructions.

#pragma once

#include <cuda_runtime.h>

inline float of_bfloat16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// Rounds to the nearest, and a tie to the even one.
inline uint32_t to_bfloat16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// The thread of row g = lane / 4 and column c = lane % 4 holds rows g and g + 8 of a, and column g
// of b. From both it holds the numbers 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of 16. From the sum it
// holds rows g and g + 8, and columns 2 c and 2 c + 1.
inline void multiply(float (&sum)[4], uint4 a, uint2 b) {
  struct Numbers {
    float a[8], b[4];
  };
  auto read = [&](auto of_lane) {
    unsigned g = cuda_on_cpu::lane() / 4, c = cuda_on_cpu::lane() % 4;
    for (unsigned k = 0; k < 16; ++k) {
      const Numbers& row = of_lane(4 * g + k % 8 / 2);
      const Numbers& even = of_lane(8 * c + k % 8 / 2);
      const Numbers& odd = of_lane(8 * c + 4 + k % 8 / 2);
      unsigned in_a = k / 8 * 4 + k % 2, in_b = k / 8 * 2 + k % 2;
      sum[0] += row.a[in_a] * even.b[in_b];
      sum[1] += row.a[in_a] * odd.b[in_b];
      sum[2] += row.a[in_a + 2] * even.b[in_b];
      sum[3] += row.a[in_a + 2] * odd.b[in_b];
    }
    return true;
  };
  auto low = [](uint32_t word) { return of_bfloat16(word & 0xffff); };
  auto high = [](uint32_t word) { return of_bfloat16(word >> 16); };
  Numbers mine{{low(a.x), high(a.x), low(a.y), high(a.y), low(a.z), high(a.z), low(a.w), high(a.w)},
               {low(b.x), high(b.x), low(b.y), high(b.y)}};
  cuda_on_cpu::with_warp(cuda_on_cpu::Point::product, mine, read);
}

inline uint32_t pack(float low, float high) { return to_bfloat16(low) | to_bfloat16(high) << 16; }

inline float bfloat16_to_float(uint16_t bits) { return of_bfloat16(bits); }

inline uint4 load_constant(const uint4* place) { return *place; }

inline uint32_t pack_float16(float low, float high) {
  return std::bit_cast<uint16_t>(_Float16(low)) | std::bit_cast<uint16_t>(_Float16(high)) << 16;
}

inline float2 unpack_float16(uint32_t word) {
  auto number = [](uint32_t bits) { return float(std::bit_cast<_Float16>(uint16_t(bits))); };
  return {number(word & 0xffff), number(word >> 16)};
}

// The two numbers of a pair are stored one after the other, with a chance for others in between.
inline void let_others_run() { cuda_on_cpu::meet(cuda_on_cpu::Point::nowhere); }

inline void store_pair(ulonglong2* place, ulonglong2 x) {
  bool first_is_x = cuda_on_cpu::random() % 2;
  (first_is_x ? place->x : place->y) = first_is_x ? x.x : x.y;
  let_others_run();
  (first_is_x ? place->y : place->x) = first_is_x ? x.y : x.x;
}

inline ulonglong2 load_pair(const ulonglong2* place) { return *place; }

inline void store_release(uint64_t* place, uint64_t x) { *place = x; }

inline uint64_t load_acquire(const uint64_t* place) { return *place; }

// Each look at the clock takes a microsecond.
inline uint64_t nanoseconds() {
  static uint64_t now = 0;
  return now += 1000;
}

inline void fail() {
  cuda_on_cpu::failure = "a thread ended its kernel";
  cuda_on_cpu::meet(cuda_on_cpu::Point::end);
}

template <class T>
T load_fresh(const T* place) {
  return *place;
}

inline void wait_for_inputs() {
  cuda_on_cpu::current->has_inputs = true;
  cuda_on_cpu::let_arrive(&cuda_on_cpu::LateInput::value);
}

// The next kernel may read what kernels before this one wrote, so they have to have ended.
inline void let_next_start() {
  if (!cuda_on_cpu::current->has_inputs)
    cuda_on_cpu::failure = "the next kernel may start before the inputs are there";
}

inline void arrive_at_cluster() { ++cuda_on_cpu::current->arrivals; }

inline void arrive_at_cluster_relaxed() { arrive_at_cluster(); }

inline void wait_for_cluster() {
  cuda_on_cpu::Thread& thread = *cuda_on_cpu::current;
  if (++thread.waits != thread.arrivals) cuda_on_cpu::failure = "a wait that no arrival belongs to";
  cuda_on_cpu::meet(cuda_on_cpu::Point::cluster);
}

inline void store_in_cluster(float* place, float4 x, int block) {
  cuda_on_cpu::store_in_cluster(reinterpret_cast<float4*>(place), x, block);
}

inline void forget(int&) {}

inline char* dynamic_shared() { return cuda_on_cpu::dynamic_of(cuda_on_cpu::running_block()); }

inline void begin_copy(void* place, const void* from, bool is_there) {
  uint4 bytes{};
  if (is_there) std::memcpy(&bytes, from, sizeof bytes);
  cuda_on_cpu::current->copies.begin([=] { std::memcpy(place, &bytes, sizeof bytes); });
}

inline void group_copies() { cuda_on_cpu::current->copies.close_group(); }

template <int kPending>
void wait_for_copies() {
  cuda_on_cpu::current->copies.wait(kPending);
}

inline cudaLaunchAttribute in_clusters(int num_blocks) { return {unsigned(num_blocks)}; }

template <class Kernel>
cudaError_t allow_large_clusters(Kernel*) {
  return cudaSuccess;
}

template <class Kernel>
cudaError_t prefer_large_cache(Kernel*) {
  return cudaSuccess;
}

template <class Kernel>
cudaError_t allow_shared_memory(Kernel*, int) {
  return cudaSuccess;
}

template <class Kernel>
int num_clusters_at_once(Kernel*, int, int, int = 0) {
  return 1;
}

inline int num_multiprocessors(int) { return 3; }

inline size_t most_shared_memory(int) { return 227 << 10; }

inline bool can_start_early(int) { return true; }

inline bool has_clusters(int) { return true; }

inline cudaLaunchAttribute may_start_early() { return {}; }
