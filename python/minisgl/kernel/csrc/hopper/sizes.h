// The sizes of tiles, and the arguments of a kernel. It includes none of CuTe's headers, which take
// a compiler seconds.
//
// Given to the compiler: PROMPT_TYPE, PROMPT_HEAD_DIM, PROMPT_HAS_WINDOW, PROMPT_HAS_SOFTCAP.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <flashinfer/fastdiv.cuh>

namespace prompts {

constexpr int kHeadDim = PROMPT_HEAD_DIM;
constexpr int kStages = 2;

static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256,
              "FlashAttention 3 takes heads of 64, 128 or 256 numbers");

// The sizes of tiles are those that FlashInfer chooses.
constexpr int kTileQ = kHeadDim == 64 ? 192 : 128;
constexpr int kPagedTileKV = kHeadDim == 256 ? 32 : 96;
constexpr int kRaggedTileKV = kHeadDim == 256 ? 64 : 128;

// In shared memory, a tile is cut into columns of 128 bytes, which are swizzled.
constexpr int kColumn = 64;

// One warpgroup of 128 threads loads. For each 64 queries, another one multiplies.
constexpr int kThreads = 128 * (1 + kTileQ / 64);

// Shared memory has the queries, the stages of keys and values, and a few barriers. The output is
// put where the values were, and may be larger.
constexpr int shared_bytes(int tile_kv) {
  const int key_rows = kStages * tile_kv;
  const int value_rows = key_rows < kTileQ ? kTileQ : key_rows;
  return 2 * kHeadDim * (kTileQ + key_rows + value_rows) + 256;
}

// The members that FlashInfer's variants of attention look for.
struct AdditionalParams {
  double logits_soft_cap;
  double sm_scale;
};

struct PagedParams {
  CUtensorMap q;
  const void* k;
  const void* v;
  const int32_t* pages;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  flashinfer::uint_fastdiv page_size;
  int window_left;
  AdditionalParams additional_params;
};

struct RaggedParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  int window_left;
  AdditionalParams additional_params;
};

// Some keys of a tile of queries. The parts of a tile follow one another.
struct Part {
  int first;  // number of the tile's first part
  int num;    // parts of the tile
  int num_queries;
  int unused;
};

// Where the outputs of parts are until the last part of a tile is finished, and merges them.
struct Parts {
  const Part* parts;
  float* outputs;  // [parts, kTileQ, kHeadDim]
  float* logs;     // [parts, kTileQ], logarithms to base 2 of the sums of weights
  int* num_done;   // finished parts of a tile, at the place of its first; zero before and after
};

struct OutputParams {
  void* o;
  int64_t token_stride;
  int64_t head_stride;
  Parts parts;
};

}  // namespace prompts
