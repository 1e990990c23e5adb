// csrc/hopper/plan.cu for a CPU, as functions that Python can call without a library.
#include "plan.cu"

extern "C" {

extern const int tile_queries = prompts::kTileQ;
extern const int keys_to_begin_and_end = prompts::kBeginAndEnd;
extern const int keys_to_join = prompts::kJoin;
extern const int paged_tile_keys = prompts::kPagedTileKV;
extern const int ragged_tile_keys = prompts::kRaggedTileKV;

// That is read for a tile of queries, before whose first there are so many.
int first_key(int64_t before, int64_t window_left, bool has_pages) {
  prompts::Prompts step{};
  step.window_left = window_left;
  step.has_pages = has_pages;
  return prompts::first_key(step, static_cast<int>(before));
}

// Plans for a device of so many processors. Returns whether there was room.
//
// places: where the members of `Work` begin in `numbers`, in their order.
bool plan(int num_processors, int32_t* numbers, int32_t* pinned_numbers, size_t num_bytes,
          int32_t* qo_indptr, int32_t* kv_indptr, int32_t* kv_length, int64_t num_tokens,
          int64_t num_prompts, int64_t num_heads, int64_t page_size, int64_t window_left,
          bool has_pages, bool is_for_graph, int max_parts, int64_t* places) {
  num_processors_of_device = num_processors;
  const int64_t num_kv_heads = 1;  // a plan does not depend on them
  const std::vector<int64_t> made = prompts::make_plan(
      {numbers, pinned_numbers, num_bytes},
      {qo_indptr, kv_indptr, kv_length, num_tokens, num_prompts, num_heads, num_kv_heads, page_size,
       window_left, has_pages},
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
