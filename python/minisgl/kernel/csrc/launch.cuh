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

// How blocks start: early where the GPU can, which needs a kernel that waits for its inputs; how many
// of them are a cluster, or 0 if they are none; how many bytes of dynamic shared memory each has; and
// whether they have much to load at a time, which needs room in the cache L1: a kernel may find it as
// small as the one before it, with much shared memory, has left it.
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
