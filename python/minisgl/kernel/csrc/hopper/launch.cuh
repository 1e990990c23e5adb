// Starts a kernel of prompts: what run_paged.cu and run_ragged.cu have in common.
#pragma once

#include <stdexcept>

#include "prompts.cuh"
#include "steps.h"

namespace prompts {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// The only kernel of a cubin.
inline cudaKernel_t load_kernel(const unsigned char* cubin) {
  cudaLibrary_t library;
  cudaKernel_t kernel;
  check(cudaLibraryLoadData(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0));
  check(cudaLibraryEnumerateKernels(&kernel, 1, library));
  return kernel;
}

inline auto rows_of(const Heads& x) {
  return flashinfer::get_gmem_layout(x.num_tokens, x.num_heads, kHeadDim, x.token_stride,
                                     x.head_stride);
}

inline Element* data_of(const Heads& x) { return static_cast<Element*>(x.data); }

template <class Kind>
void launch(const Step& step, const typename Kind::Mainloop::Arguments& keys,
            cudaKernel_t loaded) {
  const typename Kind::Epilogue::Arguments output{
      data_of(step.o), rows_of(step.o), step.lse,
      flashinfer::get_lse_gmem_layout(step.o.num_tokens, step.o.num_heads)};
  const Work& plan = step.work;
  const Scheduler::Arguments work{plan.work_indptr,
                                  plan.head_indices,
                                  plan.qo_tile_indices,
                                  plan.qo_indptr,
                                  plan.kv_indptr,
                                  plan.qo_len,
                                  plan.kv_len,
                                  plan.batch_indices,
                                  cutlass::FastDivmod(step.q.num_heads / step.k.num_heads),
                                  step.q.num_heads};
  auto mainloop = Kind::Mainloop::to_underlying_arguments(keys);
  auto epilogue = Kind::Epilogue::to_underlying_arguments(output);
  auto scheduler = Scheduler::to_underlying_arguments(work);
  void* arguments[] = {&mainloop, &epilogue, &scheduler};

  const void* kernel = loaded;
  constexpr int kSharedBytes = sizeof(typename Kind::Traits::SharedStorage);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  int num_processors;
  check(cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, step.device));
  check(cudaLaunchKernel(kernel, Scheduler::get_grid_dim(work, num_processors),
                         dim3(Kind::Traits::NUM_THREADS), arguments, kSharedBytes, step.stream));
}

}  // namespace prompts
