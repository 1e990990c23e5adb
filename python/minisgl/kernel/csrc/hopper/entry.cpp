// The functions that attention/flashinfer/prompts.py calls: plan, paged_run and ragged_run.
#include <cstdint>
#include <vector>

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "steps.h"

namespace prompts {

using tvm::ffi::Array;
using tvm::ffi::TensorView;

constexpr bool kHasWindow = PROMPT_HAS_WINDOW;

template <class T>
T* data_of(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

cudaStream_t stream_of(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// Plans the step. The plan is copied to `numbers`, a tensor of bytes, which then begins with
// kv_indptr. qo_indptr, kv_indptr and kv_length are on the host.
//
// num_tokens: the tokens of all prompts, or the most that a graph has room for.
// has_pages: whether paged_run runs the plan, or ragged_run.
// max_parts: the most parts that tiles may be cut into; 0 if there is no memory for parts.
Array<int64_t> plan(TensorView numbers, TensorView pinned_numbers, TensorView qo_indptr,
                    TensorView kv_indptr, TensorView kv_length, int64_t num_tokens,
                    int64_t num_heads, int64_t num_kv_heads, int64_t page_size,
                    int64_t window_left, bool has_pages, bool is_for_graph, int64_t max_parts) {
  TVM_FFI_ICHECK_EQ(window_left >= 0, kHasWindow);
  TVM_FFI_ICHECK_EQ(numbers.size(0), pinned_numbers.size(0));
  TVM_FFI_ICHECK_EQ(qo_indptr.size(0), kv_length.size(0) + 1);
  TVM_FFI_ICHECK_EQ(kv_indptr.size(0), kv_length.size(0) + 1);
  tvm::ffi::CUDADeviceGuard guard(numbers.device().device_id);
  load_kernels();
  const PlanMemory memory{numbers.data_ptr(), pinned_numbers.data_ptr(),
                          static_cast<size_t>(numbers.size(0))};
  const Prompts prompts{data_of<int32_t>(qo_indptr), data_of<int32_t>(kv_indptr),
                        data_of<int32_t>(kv_length), num_tokens,   kv_length.size(0),
                        num_heads,                   num_kv_heads, page_size,
                        window_left,                 has_pages};
  const std::vector<int64_t> made =
      make_plan(memory, prompts, is_for_graph, static_cast<int>(max_parts),
                stream_of(numbers.device()));
  TVM_FFI_ICHECK(!made.empty()) << "no room for the plan of " << num_tokens << " tokens in "
                                << kv_length.size(0) << " prompts";
  return Array<int64_t>(made);
}

Heads heads_of(const TensorView& x) {
  return {x.data_ptr(), static_cast<int>(x.size(0)), static_cast<int>(x.size(1)), x.stride(0),
          x.stride(1)};
}

// The number of tokens is not used, and is 0.
Heads heads_of_page(const TensorView& pages) {
  return {pages.data_ptr(), 0, static_cast<int>(pages.size(2)), pages.stride(1), pages.stride(2)};
}

Step step_of(const TensorView& numbers, const Array<int64_t>& plan, const TensorView& q,
             const Heads& k, const Heads& v, const TensorView& o, int64_t window_left,
             double softcap, double scale, Parts parts = {}) {
  TVM_FFI_ICHECK_EQ(window_left >= 0, kHasWindow);
  TVM_FFI_ICHECK_EQ(q.size(2), kHeadDim);
  const std::vector<int64_t> places(plan.begin(), plan.end());
  const Work work = work_of(places, numbers.data_ptr());
  parts.parts = work.parts;
  return {heads_of(q),
          k,
          v,
          heads_of(o),
          static_cast<int>(window_left),
          softcap,
          scale,
          work,
          parts,
          q.device().device_id,
          stream_of(q.device())};
}

// k_pages, v_pages: with equal strides.
// page_indices: the lists of pages of all prompts.
// part_outputs, part_logs, num_done: as in `Parts`.
void paged_run(TensorView numbers, Array<int64_t> plan, TensorView q, TensorView k_pages,
               TensorView v_pages, TensorView page_indices, TensorView o, int64_t window_left,
               double softcap, double scale, TensorView part_outputs, TensorView part_logs,
               TensorView num_done) {
  for (int i = 0; i < 3; ++i) TVM_FFI_ICHECK_EQ(k_pages.stride(i), v_pages.stride(i));
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  const Pages pages{data_of<int32_t>(page_indices), k_pages.stride(0),
                    static_cast<int>(k_pages.size(1))};
  const Parts parts{nullptr, data_of<float>(part_outputs), data_of<float>(part_logs),
                    data_of<int>(num_done)};
  run_paged(step_of(numbers, plan, q, heads_of_page(k_pages), heads_of_page(v_pages), o,
                    window_left, softcap, scale, parts),
            pages);
}

void ragged_run(TensorView numbers, Array<int64_t> plan, TensorView q, TensorView k, TensorView v,
                TensorView o, int64_t window_left, double softcap, double scale) {
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  run_ragged(step_of(numbers, plan, q, heads_of(k), heads_of(v), o, window_left, softcap, scale));
}

}  // namespace prompts

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, prompts::plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_run, prompts::paged_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ragged_run, prompts::ragged_run);
