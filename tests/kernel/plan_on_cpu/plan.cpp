// csrc/hopper/plan.cu for a CPU, as functions that Python can call without a library.
#include "plan.cu"

extern "C" {

extern const int tile_queries = prompts::kTileQ;
extern const int keys_to_begin_and_end = prompts::kBeginAndEnd;
extern const int keys_to_join = prompts::kJoin;

// Plans for a device of so many processors. Returns whether there was room.
//
// places: where the members of `Work` begin in `numbers`, in their order.
bool plan(int num_processors, int32_t* numbers, int32_t* pinned_numbers, size_t num_bytes,
          int32_t* qo_indptr, int32_t* kv_indptr, int32_t* kv_length, int64_t num_tokens,
          int64_t num_prompts, int64_t num_heads, int64_t page_size, bool is_for_graph,
          int max_parts, int64_t* places) {
  num_processors_of_device = num_processors;
  const int64_t num_kv_heads = 1;  // a plan does not depend on them
  const std::vector<int64_t> made = prompts::make_plan(
      {numbers, pinned_numbers, num_bytes},
      {qo_indptr, kv_indptr, kv_length, num_tokens, num_prompts, num_heads, num_kv_heads, page_size},
      is_for_graph, max_parts, nullptr);
  if (made.empty()) return false;
  const prompts::Work work = prompts::work_of(made, numbers);
  const int32_t* members[] = {
      work.work_indptr, work.head_indices, work.qo_tile_indices,
      work.qo_indptr,   work.kv_indptr,    work.qo_len,
      work.kv_len,      work.batch_indices, reinterpret_cast<const int32_t*>(work.parts)};
  for (const int32_t* member : members) *places++ = member - numbers;
  return true;
}

}  // extern "C"
