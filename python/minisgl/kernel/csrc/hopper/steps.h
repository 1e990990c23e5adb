// The arguments that entry.cpp passes to plan.cu and to launch.cu. It includes none of CUTLASS's
// headers, which take a compiler seconds. So these files are compiled in parallel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "sizes.h"

namespace prompts {

// The heads of all tokens of a tensor, or of a page if there are pages.
struct Heads {
  void* data;
  int num_tokens;
  int num_heads;
  int64_t token_stride;
  int64_t head_stride;
};

// Where the pages of all prompts are. The stride counts numbers of the tensors of keys and of
// values.
struct Pages {
  const int32_t* indices;
  int64_t stride;
  int size;
};

// The work of each of the device's multiprocessors, on the device.
struct Work {
  int32_t* work_indptr;
  int32_t* head_indices;
  int32_t* qo_tile_indices;
  int32_t* qo_indptr;
  int32_t* kv_indptr;
  int32_t* qo_len;
  int32_t* kv_len;
  int32_t* batch_indices;  // the number of the part; -1 for a whole tile
  const Part* parts;
};

// Attention of a layer.
struct Step {
  Heads q;
  Heads k;
  Heads v;
  Heads o;
  int window_left;
  double softcap;
  double scale;
  Work work;
  Parts parts;
  int device;
  cudaStream_t stream;
};

// The memory of a plan: on the device, and on the host, from which it is copied. Both have
// num_bytes.
struct PlanMemory {
  void* numbers;
  void* pinned_numbers;
  size_t num_bytes;
};

// The prompts of a step, on the host.
struct Prompts {
  int32_t* qo_indptr;
  int32_t* kv_indptr;
  int32_t* kv_length;
  int64_t num_tokens;
  int64_t num_prompts;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t window_left;  // keys that a query sees before its own; -1 for all
  bool has_pages;       // whether run_paged runs the plan, or run_ragged
};

// The memory of a plan begins with the prompts' kv_indptr. Returns the places of what follows, for
// `work_of`; nothing if the plan does not fit its memory.
//
// max_parts: the parts for which there is memory; 0 if all tiles are to stay whole. With a window
// they always do.
std::vector<int64_t> make_plan(const PlanMemory& memory, const Prompts& prompts,
                               bool is_for_graph, int max_parts, cudaStream_t stream);

Work work_of(const std::vector<int64_t>& plan, void* numbers);

// To be called before a graph is captured, which may not load kernels.
void load_kernels();

void run_paged(const Step& step, const Pages& pages);
void run_ragged(const Step& step);

}  // namespace prompts
