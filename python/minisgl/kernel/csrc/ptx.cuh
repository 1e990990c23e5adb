// PTX instructions, as functions.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// sum += a @ b. The threads of a warp hold fragments of a, 16 x 16 bfloat16s, of b, 16 x 8, and of
// the sum, 16 x 8 floats (PTX ISA, mma.m16n8k16).
__device__ inline void multiply(float (&sum)[4], uint4 a, uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// Two bfloat16s in a word, the first in its low half.
__device__ inline uint32_t pack(float low, float high) {
  __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t&>(x);
}

__device__ inline float bfloat16_to_float(uint16_t bits) { return __uint_as_float(bits << 16); }

// Reads 16 bytes that no kernel writes. They are read once, so they need not stay in the L1 cache.
// The asm is volatile, and the load not `nc`: otherwise the compiler moves it behind
// `wait_for_inputs`.
__device__ inline uint4 load_constant(const uint4* place) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(place));
  return x;
}

// Two float16s in a word, and back.
__device__ inline uint32_t pack_float16(float low, float high) {
  __half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<uint32_t&>(x);
}

__device__ inline float2 unpack_float16(uint32_t word) {
  return __half22float2(reinterpret_cast<__half2&>(word));
}

// Reads what another multiprocessor may just have written, past the L1 cache of this one.
template <class T>
__device__ T load_fresh(const T* place) {
  return __ldcg(place);
}

// Stores to memory that several GPUs write and read. Each number of a pair arrives whole, but the
// two may arrive one after the other.
__device__ inline void store_pair(ulonglong2* place, ulonglong2 x) {
  asm volatile("st.relaxed.sys.v2.b64 [%0], {%1, %2};" ::"l"(place), "l"(x.x), "l"(x.y) : "memory");
}

__device__ inline ulonglong2 load_pair(const ulonglong2* place) {
  ulonglong2 x;
  asm volatile("ld.relaxed.sys.v2.b64 {%0, %1}, [%2];"
               : "=l"(x.x), "=l"(x.y)
               : "l"(place)
               : "memory");
  return x;
}

// Whoever reads x with `load_acquire` also sees what this thread has written before, and, after a
// barrier of its block, what all threads of the block have written.
__device__ inline void store_release(uint64_t* place, uint64_t x) {
  asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(place), "l"(x) : "memory");
}

__device__ inline uint64_t load_acquire(const uint64_t* place) {
  uint64_t x;
  asm volatile("ld.acquire.sys.b64 %0, [%1];" : "=l"(x) : "l"(place) : "memory");
  return x;
}

__device__ inline uint64_t nanoseconds() {
  uint64_t x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
  return x;
}

// For the tests' stand-in, where another thread only runs if this one lets it. A GPU needs nothing.
__device__ inline void let_others_run() {}

// Ends the kernel with an error. The process cannot use this GPU afterwards.
__device__ inline void fail() { __trap(); }

// Programmatic dependent launch, as in gpu/launch.py: what a kernel does before this call may
// overlap the kernel before it.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel of the stream may start.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The barrier of a cluster: thread blocks that run together on multiprocessors of one GPC, and can
// access each other's shared memory. What its threads store before they arrive is visible to
// all threads that have waited.
__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The same where no stores need to be visible: it takes no fence.
__device__ inline void arrive_at_cluster_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores to the same address of shared memory in a block of the cluster, which may be this one.
__device__ inline void store_in_cluster(float* place, float4 x, int block) {
#if __CUDA_ARCH__ >= 900
  auto own = static_cast<uint32_t>(__cvta_generic_to_shared(place));
  asm volatile(
      "{ .reg .b32 place; mapa.shared::cluster.u32 place, %0, %1;"
      "  st.shared::cluster.v4.f32 [place], {%2, %3, %4, %5}; }" ::"r"(own),
      "r"(block), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
#endif
}

// Hides the value of x from the compiler. What depends on x is computed again after this point, and
// takes no register before it.
__device__ inline void forget(int& x) { asm volatile("" : "+r"(x)); }

// Dynamic shared memory, whose size the launch sets.
__device__ inline char* dynamic_shared() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// Copies 16 bytes to shared memory asynchronously, past the L1 cache. Unless `is_there`, it reads
// nothing and writes zeros.
__device__ inline void begin_copy(void* place, const void* from, bool is_there) {
  auto own = static_cast<uint32_t>(__cvta_generic_to_shared(place));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(own), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}

// Makes one group of this thread's copies since the last group.
__device__ inline void group_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of this thread but the last kPending have arrived.
template <int kPending>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

inline cudaLaunchAttribute in_clusters(int num_blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(num_blocks);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

// A kernel has to opt in to clusters of more than eight blocks.
template <class Kernel>
cudaError_t allow_large_clusters(Kernel* kernel) {
  auto function = reinterpret_cast<const void*>(kernel);
  return cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// A kernel has to opt in to more than 48 KiB of dynamic shared memory.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int num_bytes) {
  auto function = reinterpret_cast<const void*>(kernel);
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, num_bytes);
}

// The L1 cache gets as much as possible of the memory that it and shared memory divide.
template <class Kernel>
cudaError_t prefer_large_cache(Kernel* kernel) {
  auto function = reinterpret_cast<const void*>(kernel);
  return cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxL1);
}

// How many clusters of `num_blocks` blocks, with `num_bytes` of dynamic shared memory each, run at
// a time; 0 if the device has no clusters, or none so large.
template <class Kernel>
int num_clusters_at_once(Kernel* kernel, int num_threads, int num_blocks, int num_bytes = 0) {
  auto result = allow_large_clusters(kernel);
  if (result == cudaSuccess) result = allow_shared_memory(kernel, num_bytes);
  cudaLaunchAttribute attribute = in_clusters(num_blocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<size_t>(num_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int num_clusters = 0;
  if (result == cudaSuccess) result = cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config);
  if (result == cudaSuccess) return num_clusters;
  cudaGetLastError();  // clears the error, which the 0 stands for
  return 0;
}

// An attribute of a device; 0 if the driver does not know it.
inline int attribute_of(int device, cudaDeviceAttr attribute) {
  int x = 0;
  auto result = cudaDeviceGetAttribute(&x, attribute, device);
  return result == cudaSuccess ? x : 0;
}

inline int num_multiprocessors(int device) {
  return attribute_of(device, cudaDevAttrMultiProcessorCount);
}

// The most bytes of shared memory that a block can opt in to.
inline size_t most_shared_memory(int device) {
  return static_cast<size_t>(attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

inline bool can_start_early(int device) {
  return attribute_of(device, cudaDevAttrComputeCapabilityMajor) >= 9;
}

inline bool has_clusters(int device) {
  return attribute_of(device, cudaDevAttrComputeCapabilityMajor) >= 9;
}

inline cudaLaunchAttribute may_start_early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}
