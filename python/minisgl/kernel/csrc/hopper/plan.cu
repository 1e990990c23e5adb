// Plans which processor takes which tile of which prompt, on the host, as FlashInfer does.
#ifndef __CUDA_ARCH__  // nothing in here runs on a GPU
#include "steps.h"

#include <stdexcept>

#include <flashinfer/attention/scheduler.cuh>

namespace prompts {

using flashinfer::PrefillPlanSM90Info;

constexpr bool kCausal = true;
constexpr int kElementBytes = 2;

std::vector<int64_t> make_plan(const PlanMemory& memory, const Prompts& prompts,
                               bool is_for_graph, cudaStream_t stream) {
  PrefillPlanSM90Info info;
  void* const no_floats = nullptr;  // none are planned
  const cudaError_t error = flashinfer::PrefillSM90Plan(
      no_floats, 0, memory.numbers, memory.pinned_numbers, memory.num_bytes, info,
      prompts.qo_indptr, prompts.kv_indptr, prompts.kv_length, prompts.num_tokens,
      prompts.num_prompts, prompts.num_heads, prompts.num_kv_heads, PROMPT_HEAD_DIM,
      PROMPT_HEAD_DIM, prompts.page_size, kCausal, is_for_graph, kElementBytes, stream);
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  if (info.same_schedule_for_all_heads) return {};
  return info.ToVector();
}

Work work_of(const std::vector<int64_t>& plan, void* numbers) {
  PrefillPlanSM90Info info;
  info.FromVector(plan);
  auto at = [&](int64_t offset) {
    return reinterpret_cast<int32_t*>(static_cast<char*>(numbers) + offset);
  };
  return {at(info.work_indptr_offset),      at(info.head_indices_offset),
          at(info.qo_tile_indices_offset),  at(info.qo_indptr_offset),
          at(info.kv_indptr_offset),        at(info.qo_len_offset),
          at(info.kv_len_offset),           at(info.batch_indices_offset)};
}

}  // namespace prompts
#endif  // __CUDA_ARCH__
