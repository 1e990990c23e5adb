// What FlashInfer's wrappers call for prompts: plan, paged_run and ragged_run.
//
// The arguments are those of FlashInfer's own module, csrc/batch_prefill_sm90.cu. What this one
// does not have, as other masks than the causal one, is refused.
#include <cstdint>
#include <initializer_list>
#include <vector>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "steps.h"

namespace prompts {

using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int64_t kCausalMask = 1;  // flashinfer::MaskMode::kCausal
constexpr int64_t kTokenFirst = 0;  // flashinfer::QKVLayout::kNHD
constexpr int kHeadDim = PROMPT_HEAD_DIM;
constexpr bool kHasWindow = PROMPT_HAS_WINDOW;

template <class T>
T* data_of(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

size_t bytes_of(const TensorView& x) { return x.size(0) * x.dtype().bits / 8; }

cudaStream_t stream_of(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
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
  load_kernels();
  const Workspaces workspaces{float_workspace.data_ptr(), bytes_of(float_workspace),
                              int_workspace.data_ptr(), pinned_workspace.data_ptr(),
                              bytes_of(int_workspace)};
  const Prompts prompts{data_of<int32_t>(qo_indptr), data_of<int32_t>(kv_indptr),
                        data_of<int32_t>(kv_length), num_tokens,   num_prompts,
                        num_heads,                   num_kv_heads, page_size};
  const std::vector<int64_t> made =
      make_plan(workspaces, prompts, is_for_graph, stream_of(float_workspace.device()));
  TVM_FFI_ICHECK(!made.empty()) << "a step may have 4096 tiles of queries; it has " << num_tokens
                                << " in " << num_prompts << " prompts";
  return Array<int64_t>(made);
}

Heads heads_of(const TensorView& x) {
  return {x.data_ptr(), static_cast<int>(x.size(0)), static_cast<int>(x.size(1)), x.stride(0),
          x.stride(1)};
}

// How many tokens there are is not used.
Heads heads_of_page(const TensorView& pages) {
  return {pages.data_ptr(), 0, static_cast<int>(pages.size(2)), pages.stride(1), pages.stride(2)};
}

Step step_of(const Array<int64_t>& plan, const TensorView& int_workspace, const TensorView& q,
             const Heads& k, const Heads& v, const TensorView& o, int64_t window_left,
             double softcap, double scale) {
  const std::vector<int64_t> numbers(plan.begin(), plan.end());
  return {heads_of(q),
          k,
          v,
          heads_of(o),
          static_cast<int>(window_left),
          softcap,
          scale,
          work_of(numbers, int_workspace.data_ptr()),
          q.device().device_id,
          stream_of(q.device())};
}

void check(int64_t mask_mode, int64_t layout, int64_t window_left, const TensorView& q,
           std::initializer_list<const Optional<TensorView>*> tensors, double scale_v) {
  TVM_FFI_ICHECK_EQ(mask_mode, kCausalMask) << "this module has causal attention only";
  TVM_FFI_ICHECK_EQ(layout, kTokenFirst);
  TVM_FFI_ICHECK_EQ(window_left >= 0, kHasWindow);
  TVM_FFI_ICHECK_EQ(q.size(2), kHeadDim);
  for (const auto* tensor : tensors) {
    TVM_FFI_ICHECK(!*tensor) << "this module gives no sums, scores no items and scales no values";
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
        {&lse, &prefix_length, &position_in_item, &longest_item, &v_scales}, v_scale);
  for (int i = 0; i < 3; ++i) TVM_FFI_ICHECK_EQ(k_pages.stride(i), v_pages.stride(i));
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  const Pages pages{data_of<int32_t>(page_indices), k_pages.stride(0),
                    static_cast<int>(k_pages.size(1))};
  run_paged(step_of(plan, int_workspace, q, heads_of_page(k_pages), heads_of_page(v_pages), o,
                    window_left, softcap, scale),
            pages);
}

void ragged_run(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                TensorView q, TensorView k, TensorView v, TensorView qo_indptr,
                TensorView kv_indptr, TensorView o, Optional<TensorView> lse, int64_t mask_mode,
                int64_t layout, int64_t window_left, bool may_start_early,
                Optional<TensorView> prefix_length, Optional<TensorView> position_in_item,
                Optional<TensorView> longest_item, Optional<TensorView> v_scales, double softcap,
                double scale, double v_scale, int64_t num_positions_in_item) {
  check(mask_mode, layout, window_left, q,
        {&lse, &prefix_length, &position_in_item, &longest_item, &v_scales}, v_scale);
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  run_ragged(step_of(plan, int_workspace, q, heads_of(k), heads_of(v), o, window_left, softcap,
                     scale));
}

}  // namespace prompts

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, prompts::plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_run, prompts::paged_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ragged_run, prompts::ragged_run);
