// Starts the kernels of paged.cu and ragged.cu.
#ifndef __CUDA_ARCH__  // nothing in here runs on a GPU
#include <stdexcept>

#include <cuda.h>
#include <cute/container/tuple.hpp>  // the next header needs it, and does not include it
#include <flashinfer/attention/hopper/tile_scheduler.cuh>

#include "sizes.h"
#include "steps.h"

extern "C" const unsigned char prompts_paged_cubin[];  // see cubins.S
extern "C" const unsigned char prompts_ragged_cubin[];

namespace prompts {

using Scheduler = flashinfer::BatchPrefillPersistentTileScheduler<int32_t>;

static void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// The only kernel of a cubin.
static cudaKernel_t load_kernel(const unsigned char* cubin) {
  cudaLibrary_t library;
  cudaKernel_t kernel;
  check(cudaLibraryLoadData(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0));
  check(cudaLibraryEnumerateKernels(&kernel, 1, library));
  return kernel;
}

static cudaKernel_t paged_kernel() {
  static cudaKernel_t loaded = load_kernel(prompts_paged_cubin);
  return loaded;
}

static cudaKernel_t ragged_kernel() {
  static cudaKernel_t loaded = load_kernel(prompts_ragged_cubin);
  return loaded;
}

// A function of the driver, found at run time, since the driver's library is not linked.
static auto tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// The tensor map of tiles of `tile_rows` rows of a head: where they are in global memory, and how
// they are swizzled in shared memory. For a copy, any type of 16 bits will do.
static CUtensorMap map_of(const Heads& x, int tile_rows) {
  static const auto encode = tensor_map_encoder();
  const cuuint64_t sizes[] = {kHeadDim, cuuint64_t(x.num_tokens), cuuint64_t(x.num_heads)};
  const cuuint64_t strides[] = {2 * cuuint64_t(x.token_stride), 2 * cuuint64_t(x.head_stride)};
  const cuuint32_t box[] = {kColumn, cuuint32_t(tile_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, x.data, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("heads do not lie as a tensor map needs");
  return map;
}

template <class Params>
static void launch(cudaKernel_t loaded, int num_shared_bytes, Params params, const Step& step) {
  const Work& plan = step.work;
  OutputParams output{step.o.data, step.o.token_stride, step.o.head_stride, step.parts};
  Scheduler::Params work{plan.work_indptr,
                         plan.head_indices,
                         plan.qo_tile_indices,
                         plan.qo_indptr,
                         plan.kv_indptr,
                         plan.qo_len,
                         plan.kv_len,
                         plan.batch_indices,
                         cutlass::FastDivmod(step.q.num_heads / step.k.num_heads)};
  void* arguments[] = {&params, &output, &work};

  const void* kernel = loaded;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             num_shared_bytes));
  int num_processors;
  check(cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, step.device));
  cudaLaunchAttribute may_start_early{};
  may_start_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  may_start_early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_processors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = num_shared_bytes;
  config.stream = step.stream;
  config.attrs = &may_start_early;
  config.numAttrs = 1;
  check(cudaLaunchKernelExC(&config, kernel, arguments));
}

void load_kernels() {
  paged_kernel();
  ragged_kernel();
}

void run_paged(const Step& step, const Pages& pages) {
  const PagedParams params{map_of(step.q, kTileQ),
                           step.k.data,
                           step.v.data,
                           pages.indices,
                           pages.stride,
                           step.k.token_stride,
                           step.k.head_stride,
                           flashinfer::uint_fastdiv(pages.size),
                           step.window_left,
                           {step.softcap, step.scale}};
  launch(paged_kernel(), shared_bytes(kPagedTileKV), params, step);
}

void run_ragged(const Step& step) {
  const RaggedParams params{map_of(step.q, kTileQ),
                            map_of(step.k, kRaggedTileKV),
                            map_of(step.v, kRaggedTileKV),
                            step.window_left,
                            {step.softcap, step.scale}};
  launch(ragged_kernel(), shared_bytes(kRaggedTileKV), params, step);
}

}  // namespace prompts
#endif  // __CUDA_ARCH__
