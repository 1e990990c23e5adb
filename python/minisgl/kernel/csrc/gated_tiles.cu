// The product of many tokens with the gate and up projections of an MLP, and the activation, on
// Hopper. The contract is in gpu_products.py.
//
// A block computes one tile of 128 tokens and 128 outputs after the other. One of its threads has
// boxes of the tokens and of the weight copied to shared memory, as far ahead as there is room. Two
// warpgroups multiply them, 64 tokens each, so that gate and up of an output are in the same
// thread. Large products are limited by the power of a GPU. The two blocks of a cluster compute
// neighbouring tiles of the same tokens: with Qwen3-14B this was the fastest order that was tried
// (docs/decisions/0013).
//
// Dimensions: F mlp width, I inputs of a linear layer, T tokens of a step, U both halves of a gated
// mlp.

#include <algorithm>

#include <hopper.cuh>

#include "launch.cuh"
#include "linear.cuh"
#include "stages.cuh"

namespace {

constexpr int kTokens = 128, kOutputs = 128;  // of a tile
constexpr int kInputs = 64;                   // of a stage: 128 bytes, as many as are swizzled
constexpr int kStages = 4;
constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kTokensOfConsumer = kTokens / kConsumers;
constexpr int kColumns = 64;  // outputs of a store: 128 bytes
constexpr int kStores = kOutputs / kColumns;
constexpr int kCluster = 2;
constexpr int kGroup = 16;  // tiles of tokens that share what is read of the weight

using Numbers = uint16_t;

struct Stage {
  Numbers x[kTokens][kInputs];
  Numbers gate[kOutputs][kInputs], up[kOutputs][kInputs];  // 256 rows for `multiply_64`
};

struct Shared {
  Stage stages[kStages];
  Numbers y[kConsumers][kStores][kTokensOfConsumer][kColumns];
  uint64_t is_full[kStages], is_empty[kStages];
};

constexpr int kAlignment = 1024;  // of what is swizzled
constexpr int kSharedBytes = sizeof(Shared) + kAlignment;

struct Tiles {
  int of_tokens, of_outputs;  // the second is a multiple of the cluster's size
  int stages;                 // of a tile
  int width;                  // F

  __host__ __device__ int num() const { return of_tokens * of_outputs; }
};

struct Tile {
  int token, output;  // the first
};

// The blocks of a cluster have neighbouring outputs of the same tokens, and the clusters beside it
// other tokens of a group with the same outputs.
__device__ inline Tile tile_at(const Tiles& tiles, int number) {
  int pair = number / kCluster, pairs_of_row = tiles.of_outputs / kCluster;
  int group = pair / (kGroup * pairs_of_row), first = group * kGroup;
  int height = min(kGroup, tiles.of_tokens - first);
  int in_group = pair - first * pairs_of_row;
  int row = first + in_group % height;
  int column = in_group / height * kCluster + number % kCluster;
  return {row * kTokens, column * kOutputs};
}

__device__ inline void copy_tiles(Shared& shared, const CUtensorMap& x, const CUtensorMap& weight,
                                  const Tiles& tiles) {
  Turn<kStages> turn;
  for (int number = blockIdx.x; number < tiles.num(); number += gridDim.x) {
    Tile tile = tile_at(tiles, number);
    for (int i = 0; i < tiles.stages; ++i, turn.go_on()) {
      wait_for_phase(&shared.is_empty[turn.stage], turn.phase ^ 1);
      Stage& stage = shared.stages[turn.stage];
      uint64_t* is_full = &shared.is_full[turn.stage];
      int input = i * kInputs;
      arrive_and_expect(is_full, sizeof(Stage));
      begin_box_copy(stage.x, x, input, tile.token, is_full);
      begin_box_copy(stage.gate, weight, input, tile.output, is_full);
      begin_box_copy(stage.up, weight, input, tiles.width + tile.output, is_full);
    }
  }
}

__device__ inline void multiply_tile(Shared& shared, const Tiles& tiles, int consumer,
                                     Turn<kStages>& turn, float (&sums)[128]) {
  bool speaks = threadIdx.x % 32 == 0;  // for its warp
  int last = -1;  // the stage that products may still read
  for (int i = 0; i < tiles.stages; ++i, turn.go_on()) {
    wait_for_phase(&shared.is_full[turn.stage], turn.phase);
    const Stage& stage = shared.stages[turn.stage];
    uint64_t x = describe_matrix(stage.x[consumer * kTokensOfConsumer]);
    uint64_t weight = describe_matrix(stage.gate);
    begin_products();
#pragma unroll
    for (int j = 0; j < kInputs / 16; ++j)
      multiply_64<256>(sums, x + j * kNext16Inputs, weight + j * kNext16Inputs, i | j);
    group_products();
    wait_for_products<1>();
    if (speaks && last >= 0) arrive(&shared.is_empty[last]);
    last = turn.stage;
  }
  wait_for_products<0>();
  read_now(sums);
  if (speaks) arrive(&shared.is_empty[last]);
}

__device__ inline void store_tile(Shared& shared, const CUtensorMap& y, Tile tile, int consumer,
                                  bool leads, const float (&sums)[128]) {
  auto& staged = shared.y[consumer];
  int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
  int token = warp * 16 + lane % 16;
  if (leads) wait_until_stores_have_read();  // those of the tile before
  sync_warpgroup(1 + consumer);
#pragma unroll
  for (int store = 0; store < kStores; ++store) {
#pragma unroll
    for (int piece = 0; piece < kColumns / 8; piece += 2) {  // of 8 outputs
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int gate = 4 * (store * kColumns / 8 + piece + i / 2) + i % 2 * 2, up = gate + 64;
        words[i] = pack(fast_silu_and_mul(sums[gate], sums[up]),
                        fast_silu_and_mul(sums[gate + 1], sums[up + 1]));
      }
      int swizzled = (piece + lane / 16) ^ token % 8;
      store_matrices(&staged[store][token][8 * swizzled], words);
    }
  }
  publish_to_stores();
  sync_warpgroup(1 + consumer);
  if (!leads) return;
  for (int store = 0; store < kStores; ++store)
    begin_box_store(y, tile.output + store * kColumns, tile.token + consumer * kTokensOfConsumer,
                    staged[store]);
  group_stores();
}

__global__ void __launch_bounds__(kThreads, 1)
    multiply_gated_tiles(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap weight,
                         const __grid_constant__ CUtensorMap y, const Tiles tiles) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fail();
#else
  auto begin = reinterpret_cast<uint64_t>(dynamic_shared());
  begin = (begin + kAlignment - 1) / kAlignment * kAlignment;
  auto& shared = *reinterpret_cast<Shared*>(begin);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&shared.is_full[i], 1);
      init_barrier(&shared.is_empty[i], kConsumers * kWarpgroup / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    shrink_to<40>();
    if (threadIdx.x == 0) {
      wait_for_inputs();
      let_next_start();
      copy_tiles(shared, x, weight, tiles);
    }
  } else {
    grow_to<232>();
    int consumer = warpgroup - 1;
    bool leads = threadIdx.x % kWarpgroup == 0;
    Turn<kStages> turn;
    float sums[128];
    for (int number = blockIdx.x; number < tiles.num(); number += gridDim.x) {
      multiply_tile(shared, tiles, consumer, turn, sums);
      store_tile(shared, y, tile_at(tiles, number), consumer, leads, sums);
    }
    if (leads) wait_for_stores();
  }
#endif
}

int num_parts(int64_t whole, int part) {
  return static_cast<int>((whole + part - 1) / part);
}

Tiles tiles_of(TensorView x_TI, TensorView weight_UI) {
  int64_t width = weight_UI.size(0) / 2;
  return {num_parts(x_TI.size(0), kTokens), kCluster * num_parts(width, kCluster * kOutputs),
          num_parts(x_TI.size(1), kInputs), static_cast<int>(width)};
}

int num_tiles_at_once(int device) { return num_multiprocessors(device) / kCluster * kCluster; }

}  // namespace

// Whether the device can make tiles, and few of its multiprocessors are idle while the last are made,
// or make one that lies outside.
// On an H200 it then took up to 17 % less time than cuBLAS and a kernel of the activation, and at most
// 0.3 % more (docs/decisions/0013).
bool fills_gated_tiles(TensorView x_TI, TensorView weight_UI) {
  constexpr int kFewestTokens = 512;
  constexpr double kSmallestShare = 0.9;
  int device = x_TI.device().device_id;
  if (x_TI.size(0) < kFewestTokens || !is_hopper(device)) return false;
  Tiles tiles = tiles_of(x_TI, weight_UI);
  int at_once = num_tiles_at_once(device);
  int num_turns = num_parts(tiles.num(), at_once);
  int num_useful = tiles.of_tokens * num_parts(tiles.width, kOutputs);
  return num_useful >= kSmallestShare * at_once * num_turns;
}

void gated_tiles(TensorView x_TI, TensorView weight_UI, TensorView y_TF) {
  Tiles tiles = tiles_of(x_TI, weight_UI);
  if (tiles.of_tokens == 0) return;
  DLDevice device = x_TI.device();
  int num_blocks = std::min(tiles.num(), num_tiles_at_once(device.device_id));
  Start start;
  start.cluster = kCluster;
  start.shared = kSharedBytes;
  launch(start, device, num_blocks, kThreads, multiply_gated_tiles, map_of_boxes(x_TI, kTokens),
         map_of_boxes(weight_UI, kOutputs), map_of_boxes(y_TF, kTokensOfConsumer), tiles);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fills_gated_tiles, fills_gated_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated_tiles, gated_tiles);
