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

// Launches on the current stream of the device. A kernel that may start early has to wait for its
// inputs.
template <class... Parameters, class... Arguments>
void launch(bool starts_early, DLDevice device, int num_blocks, int num_threads,
            void (*kernel)(Parameters...), Arguments... arguments) {
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  cudaLaunchAttribute early = may_start_early();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  auto stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = starts_early && can_start_early(device.device_id);
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class... Parameters, class... Arguments>
void launch(DLDevice device, int num_blocks, int num_threads, void (*kernel)(Parameters...),
            Arguments... arguments) {
  launch(true, device, num_blocks, num_threads, kernel, arguments...);
}
