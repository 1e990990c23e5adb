// How the functions that Python calls launch a kernel.

#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <ptx.cuh>

template <class T>
T* data_of(const tvm::ffi::TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

// How the blocks of a kernel start.
//
// early: before the previous kernel ends, where the GPU can. The kernel has to wait for its inputs.
// cluster: blocks of a cluster; 0 without clusters.
// shared: bytes of dynamic shared memory of a block.
// large_cache: whether blocks have many loads in flight, which need room in the L1 cache. Otherwise
// the cache may be as small as the previous kernel, with much shared memory, has left it.
struct Start {
  bool early = true;
  int cluster = 0;
  int shared = 0;
  bool large_cache = false;
};

// Launches on the current stream of the device.
template <class... Parameters, class... Arguments>
void launch(Start start, DLDevice device, int num_blocks, int num_threads,
            void (*kernel)(Parameters...), Arguments... arguments) {
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  cudaLaunchAttribute attributes[2];
  unsigned num_attributes = 0;
  if (start.early && can_start_early(device.device_id))
    attributes[num_attributes++] = may_start_early();
  if (start.cluster) attributes[num_attributes++] = in_clusters(start.cluster);
  if (start.cluster > 8) TVM_FFI_CHECK_CUDA_ERROR(allow_large_clusters(kernel));
  if (start.shared) TVM_FFI_CHECK_CUDA_ERROR(allow_shared_memory(kernel, start.shared));
  if (start.large_cache) TVM_FFI_CHECK_CUDA_ERROR(prefer_large_cache(kernel));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<size_t>(start.shared);
  auto stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class... Parameters, class... Arguments>
void launch(DLDevice device, int num_blocks, int num_threads, void (*kernel)(Parameters...),
            Arguments... arguments) {
  launch(Start{}, device, num_blocks, num_threads, kernel, arguments...);
}
