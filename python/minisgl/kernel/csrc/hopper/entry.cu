// What FlashInfer's wrappers call for prompts: plan, paged_run and ragged_run.
//
// The arguments are those of FlashInfer's own module, csrc/batch_prefill_sm90.cu. What this one
// does not have, as other masks than the causal one, is refused.
#ifndef __CUDA_ARCH__  // nothing in here runs on a GPU
#include <cstdint>
#include <initializer_list>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "prompts.cuh"

#include <flashinfer/attention/scheduler.cuh>

// The cubins of paged.cu and ragged.cu, see cubins.S.
extern "C" const unsigned char prompts_paged_cubin[];
extern "C" const unsigned char prompts_ragged_cubin[];

namespace prompts {

using flashinfer::PrefillPlanSM90Info;
using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int64_t kCausalMask = static_cast<int64_t>(flashinfer::MaskMode::kCausal);

template <class T>
T* data_of(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

int64_t bytes_of(const TensorView& x) { return x.size(0) * x.dtype().bits / 8; }

cudaStream_t stream_of(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// The only kernel of a cubin.
cudaKernel_t load_kernel(const unsigned char* cubin) {
  cudaLibrary_t library;
  cudaKernel_t kernel;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaLibraryLoadData(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0));
  TVM_FFI_CHECK_CUDA_ERROR(cudaLibraryEnumerateKernels(&kernel, 1, library));
  return kernel;
}

cudaKernel_t kernel_of(Paged) {
  static cudaKernel_t kernel = load_kernel(prompts_paged_cubin);
  return kernel;
}

cudaKernel_t kernel_of(Ragged) {
  static cudaKernel_t kernel = load_kernel(prompts_ragged_cubin);
  return kernel;
}

Array<int64_t> plan(TensorView float_workspace, TensorView int_workspace,
                    TensorView pinned_workspace, TensorView qo_indptr, TensorView kv_indptr,
                    TensorView kv_length, int64_t num_tokens, int64_t num_prompts,
                    int64_t num_heads, int64_t num_kv_heads, int64_t page_size,
                    bool is_for_graph, int64_t head_dim_qk, int64_t head_dim_vo, bool is_causal,
                    int64_t window_left) {
  TVM_FFI_ICHECK(is_causal) << "this module has causal attention only";
  TVM_FFI_ICHECK_EQ(head_dim_qk, kHeadDim);
  TVM_FFI_ICHECK_EQ(head_dim_vo, kHeadDim);
  tvm::ffi::CUDADeviceGuard guard(float_workspace.device().device_id);
  // Loaded here, because a graph that is being captured may not load them.
  kernel_of(Paged{});
  kernel_of(Ragged{});
  PrefillPlanSM90Info info;
  TVM_FFI_CHECK_CUDA_ERROR(flashinfer::PrefillSM90Plan(
      float_workspace.data_ptr(), bytes_of(float_workspace), int_workspace.data_ptr(),
      pinned_workspace.data_ptr(), bytes_of(int_workspace), info, data_of<int32_t>(qo_indptr),
      data_of<int32_t>(kv_indptr), data_of<int32_t>(kv_length), num_tokens, num_prompts,
      num_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, is_causal, is_for_graph,
      sizeof(Element), stream_of(float_workspace.device())));
  TVM_FFI_ICHECK(!info.same_schedule_for_all_heads)
      << "a step may have 4096 tiles of " << kTileQ << " queries; it has " << num_tokens
      << " in " << num_prompts << " prompts";
  return Array<int64_t>(info.ToVector());
}

// Where the plan of a step lies on the device, and for how many heads it is.
Scheduler::Arguments work_of(const Array<int64_t>& plan, const TensorView& int_workspace,
                             int num_heads, int num_kv_heads) {
  PrefillPlanSM90Info info;
  info.FromVector(std::vector<int64_t>(plan.begin(), plan.end()));
  auto numbers = [&](int64_t offset) {
    return reinterpret_cast<int32_t*>(data_of<char>(int_workspace) + offset);
  };
  return {numbers(info.work_indptr_offset),
          numbers(info.head_indices_offset),
          numbers(info.qo_tile_indices_offset),
          numbers(info.qo_indptr_offset),
          numbers(info.kv_indptr_offset),
          numbers(info.qo_len_offset),
          numbers(info.kv_len_offset),
          numbers(info.batch_indices_offset),
          cutlass::FastDivmod(num_heads / num_kv_heads),
          num_heads};
}

template <class Kind>
void launch(DLDevice device, typename Kind::Mainloop::Arguments keys,
            typename Kind::Epilogue::Arguments output, const Scheduler::Arguments& work) {
  auto mainloop = Kind::Mainloop::to_underlying_arguments(keys);
  auto epilogue = Kind::Epilogue::to_underlying_arguments(output);
  auto scheduler = Scheduler::to_underlying_arguments(work);
  void* arguments[] = {&mainloop, &epilogue, &scheduler};

  const void* kernel = kernel_of(Kind{});
  constexpr int kSharedBytes = sizeof(typename Kind::Traits::SharedStorage);
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  int num_processors;
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(
      &num_processors, cudaDevAttrMultiProcessorCount, device.device_id));
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernel(kernel, Scheduler::get_grid_dim(work, num_processors),
                                            dim3(Kind::Traits::NUM_THREADS), arguments,
                                            kSharedBytes, stream_of(device)));
}

auto rows_of(const TensorView& x) {
  return flashinfer::get_gmem_layout(x.size(0), x.size(1), kHeadDim, x.stride(0), x.stride(1));
}

template <class Kind>
typename Kind::Epilogue::Arguments output_of(TensorView o, const Optional<TensorView>& lse) {
  float* lse_ptr = lse ? data_of<float>(lse.value()) : nullptr;
  return {data_of<Element>(o), rows_of(o), lse_ptr,
          flashinfer::get_lse_gmem_layout(o.size(0), o.size(1))};
}

void check(int64_t mask_mode, int64_t layout, int64_t window_left, const TensorView& q,
           std::initializer_list<Optional<TensorView>> tensors, double scale_v) {
  TVM_FFI_ICHECK_EQ(mask_mode, kCausalMask) << "this module has causal attention only";
  TVM_FFI_ICHECK(static_cast<flashinfer::QKVLayout>(layout) == flashinfer::QKVLayout::kNHD);
  TVM_FFI_ICHECK_EQ(window_left >= 0, kHasWindow);
  TVM_FFI_ICHECK_EQ(q.size(2), kHeadDim);
  for (const auto& tensor : tensors) {
    TVM_FFI_ICHECK(!tensor) << "this module scores no items and scales no values";
  }
  TVM_FFI_ICHECK_EQ(scale_v, 1.0) << "this module scales no values";
}

void paged_run(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
               TensorView q, TensorView k_pages, TensorView v_pages, TensorView qo_indptr,
               TensorView page_indptr, TensorView page_indices, TensorView last_page_length,
               TensorView o, Optional<TensorView> lse, int64_t mask_mode, int64_t layout,
               int64_t window_left, bool may_start_early, Optional<TensorView> prefix_length,
               Optional<TensorView> position_in_item, Optional<TensorView> longest_item,
               Optional<TensorView> v_scales, double softcap, double scale, double v_scale,
               int64_t num_positions_in_item) {
  check(mask_mode, layout, window_left, q,
        {prefix_length, position_in_item, longest_item, v_scales}, v_scale);
  TVM_FFI_ICHECK_EQ(k_pages.stride(0), v_pages.stride(0));
  TVM_FFI_ICHECK_EQ(k_pages.stride(1), v_pages.stride(1));
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  int num_heads = q.size(1);
  int num_kv_heads = k_pages.size(2);
  auto rows_of_page = [&](const TensorView& x) {  // how many there are is not used
    return flashinfer::get_gmem_layout(0, num_kv_heads, kHeadDim, x.stride(1), x.stride(2));
  };
  launch<Paged>(q.device(),
                {data_of<Element>(q), rows_of(q), data_of<Element>(k_pages),
                 rows_of_page(k_pages), data_of<Element>(v_pages), rows_of_page(v_pages),
                 data_of<int32_t>(page_indices), static_cast<int>(window_left), k_pages.stride(0),
                 v_pages.stride(0), static_cast<uint32_t>(k_pages.size(1)), {softcap, scale}},
                output_of<Paged>(o, lse),
                work_of(plan, int_workspace, num_heads, num_kv_heads));
}

void ragged_run(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                TensorView q, TensorView k, TensorView v, TensorView qo_indptr,
                TensorView kv_indptr, TensorView o, Optional<TensorView> lse, int64_t mask_mode,
                int64_t layout, int64_t window_left, bool may_start_early,
                Optional<TensorView> prefix_length, Optional<TensorView> position_in_item,
                Optional<TensorView> longest_item, Optional<TensorView> v_scales, double softcap,
                double scale, double v_scale, int64_t num_positions_in_item) {
  check(mask_mode, layout, window_left, q,
        {prefix_length, position_in_item, longest_item, v_scales}, v_scale);
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  launch<Ragged>(q.device(),
                 {data_of<Element>(q), rows_of(q), data_of<Element>(k), rows_of(k),
                  data_of<Element>(v), rows_of(v), static_cast<int>(window_left),
                  {softcap, scale}},
                 output_of<Ragged>(o, lse),
                 work_of(plan, int_workspace, q.size(1), k.size(1)));
}

}  // namespace prompts

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, prompts::plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_run, prompts::paged_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ragged_run, prompts::ragged_run);

#endif  // __CUDA_ARCH__
