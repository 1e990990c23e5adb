// The product of some tokens with a large weight, on Hopper. The contract is in gpu_products.py.
//
// Such a product is bound by reading the weight. A block computes one tile: some rows of the weight,
// for all tokens and a part of the inputs. It has as many rows as make a tile for each multiprocessor.
// Boxes of the weight and of the tokens are copied to shared memory as far ahead as there is room;
// those of the weight begin before the kernel before this one has ended. The weight is read once, so
// it leaves the L2 cache first: on an H200, 128 tokens with 17,408 inputs and 5,120 outputs took 57 µs
// without that, and take 54.
//
// In the products the weight's rows are rows, 64 of a warpgroup, and the tokens are columns.
//
// Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
// step, U both halves of a gated mlp, X a selection out of another dimension: parts of the inputs.

#include <algorithm>

#include <hopper.cuh>

#include "launch.cuh"
#include "linear.cuh"
#include "stages.cuh"

namespace {

constexpr int kRows = 64;         // of the weight, for a warpgroup
constexpr int kInputs = 64;       // of a stage: 128 bytes, as many as are swizzled
constexpr int kMostStages = 16;   // more do not help
constexpr int kAlignment = 1024;  // of what is swizzled
constexpr int kRoom = 225 << 10;  // for stages
constexpr int kPiece = 8;         // outputs that a thread writes at a time

using Numbers = uint16_t;

// The last warp has copies made.
template <int kGroups>
constexpr int kThreads = kGroups * kWarpgroup + 32;

template <int kTokens, int kGroups>
struct Stage {
  Numbers weight[kGroups * kRows][kInputs];
  Numbers x[kTokens][kInputs];
};

template <int kTokens, int kGroups>
struct Shared {
  using Stage = ::Stage<kTokens, kGroups>;
  static constexpr int kStages = std::min<int>(kMostStages, kRoom / sizeof(Stage));

  union {
    Stage stages[kStages];
    // Once all stages have been multiplied. The threads of a warp write to all banks.
    alignas(16) float sums[kTokens][kGroups * kRows + 4];
  };
  uint64_t is_full[kStages], is_empty[kStages];
};

struct Tiles {
  int side_by_side;   // of the same part of the inputs
  int rows;           // of a tile, in each half of the weight
  int parts, stages;  // of all inputs
  int token_rows;     // of a box
};

struct alignas(16) Piece {
  float at[kPiece];
};

// Parts of sums, or of the sums themselves if there is one part.
struct Result {
  float* parts;
  Numbers* sums;
  const Numbers* bias;  // may be null
  int tokens, outputs;
};

// The tile of a block.
struct Tile {
  int output;         // the first
  int part;
  int stage, stages;  // of the inputs: the first, and how many

  __device__ explicit Tile(const Tiles& tiles)
      : output(blockIdx.x % tiles.side_by_side * tiles.rows),
        part(blockIdx.x / tiles.side_by_side),
        stage(part * tiles.stages / tiles.parts),
        stages((part + 1) * tiles.stages / tiles.parts - stage) {}
};

// What one thread of a block does: it has boxes copied.
template <int kHalves, class Shared>
struct Copier {
  Shared& shared;
  const CUtensorMap& x;
  const CUtensorMap& weight;
  const Tiles& tiles;
  const Tile& tile;
  int outputs;

  // Those for which there is room, of the tokens once the kernel before this one has ended.
  __device__ void begin() const {
    for (int i = 0; i < ahead(); ++i) copy_weight(i, i);
    wait_for_inputs();
    for (int i = 0; i < ahead(); ++i) copy_tokens(i, i);
  }

  __device__ void go_on() const {
    Turn<Shared::kStages> turn;
    for (int i = ahead(); i < tile.stages; ++i, turn.go_on()) {
      wait_for_phase(&shared.is_empty[turn.stage], turn.phase);
      copy_weight(i, turn.stage);
      copy_tokens(i, turn.stage);
    }
  }

  __device__ int ahead() const { return min(tile.stages, Shared::kStages); }

  // Stage `i` of the tile to a stage of shared memory.
  __device__ void copy_weight(int i, int to) const {
    uint64_t* is_full = &shared.is_full[to];
    arrive_and_expect(is_full, (kHalves * tiles.rows + tiles.token_rows) * kInputs * 2);
    for (int half = 0; half < kHalves; ++half)
      begin_streamed_copy(shared.stages[to].weight[half * tiles.rows], weight, input(i),
                          half * outputs + tile.output, is_full);
  }

  __device__ void copy_tokens(int i, int to) const {
    begin_box_copy(shared.stages[to].x, x, input(i), 0, &shared.is_full[to]);
  }

  __device__ int input(int i) const { return (tile.stage + i) * kInputs; }
};

template <int kTokens, class Shared>
__device__ void multiply_tile(Shared& shared, const Tile& tile, float (&sums)[kTokens / 2]) {
  bool speaks = threadIdx.x % 32 == 0;  // for its warp
  int row = threadIdx.x / kWarpgroup * kRows;
  int last = -1;  // the stage that products may still read
  Turn<Shared::kStages> turn;
  for (int i = 0; i < tile.stages; ++i, turn.go_on()) {
    wait_for_phase(&shared.is_full[turn.stage], turn.phase);
    const auto& stage = shared.stages[turn.stage];
    uint64_t weight = describe_matrix(stage.weight[row]), x = describe_matrix(stage.x);
    begin_products();
#pragma unroll
    for (int j = 0; j < kInputs / 16; ++j)
      multiply_64<kTokens>(sums, weight + j * kNext16Inputs, x + j * kNext16Inputs, i | j);
    group_products();
    wait_for_products<1>();
    if (speaks && last >= 0) arrive(&shared.is_empty[last]);
    last = turn.stage;
  }
  wait_for_products<0>();
  read_now(sums);
}

template <int kTokens, class Shared>
__device__ void share_sums(Shared& shared, const float (&sums)[kTokens / 2]) {
  int lane = threadIdx.x % 32;
  int row = threadIdx.x / 32 * 16 + lane / 4, token = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i)
    shared.sums[i / 4 * 8 + token + i % 2][row + i % 4 / 2 * 8] = sums[i];
}

template <int kHalves, int kNumThreads, class Shared>
__device__ void write_tile(const Shared& shared, const Tiles& tiles, const Tile& tile,
                           const Result& result) {
  int pieces = tiles.rows / kPiece;
  for (int i = threadIdx.x; i < result.tokens * pieces; i += kNumThreads) {
    int token = i / pieces, row = i % pieces * kPiece, output = tile.output + row;
    if (output >= result.outputs) continue;
    auto sums_from = [&](int first) {
      return reinterpret_cast<const Piece&>(shared.sums[token][first]);
    };
    Piece y = sums_from(row);
    if constexpr (kHalves == 2) {
      Piece up = sums_from(tiles.rows + row);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) y.at[j] = silu_and_mul(y.at[j], up.at[j]);
    }
    if (result.bias && tile.part == 0) {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) y.at[j] += bfloat16_to_float(result.bias[output + j]);
    }
    int64_t place = int64_t{tile.part * result.tokens + token} * result.outputs + output;
    if (result.parts) {
      reinterpret_cast<Piece&>(result.parts[place]) = y;
    } else {
      uint4 rounded{pack(y.at[0], y.at[1]), pack(y.at[2], y.at[3]), pack(y.at[4], y.at[5]),
                    pack(y.at[6], y.at[7])};
      reinterpret_cast<uint4&>(result.sums[place]) = rounded;
    }
  }
}

template <int kTokens, int kGroups, int kHalves>
__global__ void __launch_bounds__(kThreads<kGroups>, 1)
    multiply_row_tiles(const __grid_constant__ CUtensorMap x,
                       const __grid_constant__ CUtensorMap weight, const Tiles tiles,
                       const Result result) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fail();
#else
  using Shared = ::Shared<kTokens, kGroups>;
  auto begin = reinterpret_cast<uint64_t>(dynamic_shared());
  begin = (begin + kAlignment - 1) / kAlignment * kAlignment;
  auto& shared = *reinterpret_cast<Shared*>(begin);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      init_barrier(&shared.is_full[i], 1);
      init_barrier(&shared.is_empty[i], kGroups * kWarpgroup / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  Tile tile(tiles);
  Copier<kHalves, Shared> copier{shared, x, weight, tiles, tile, result.outputs};
  bool multiplies = threadIdx.x < kGroups * kWarpgroup, copies = threadIdx.x == kGroups * kWarpgroup;
  float sums[kTokens / 2];
  if (copies) {
    copier.begin();
    let_next_start();
    copier.go_on();
  }
  if (multiplies) multiply_tile<kTokens>(shared, tile, sums);
  __syncthreads();  // sums take the place of stages
  if (multiplies) share_sums<kTokens>(shared, sums);
  __syncthreads();
  write_tile<kHalves, kThreads<kGroups>>(shared, tiles, tile, result);
#endif
}

template <int kTokens, int kGroups, int kHalves>
void launch_tiles(DLDevice device, const CUtensorMap& x, const CUtensorMap& weight,
                  const Tiles& tiles, const Result& result) {
  Start start;
  start.shared = sizeof(Shared<kTokens, kGroups>) + kAlignment;
  launch(start, device, tiles.side_by_side * tiles.parts, kThreads<kGroups>,
         multiply_row_tiles<kTokens, kGroups, kHalves>, x, weight, tiles, result);
}

// More sums do not fit the registers. Without an activation, more rows do not help.
constexpr int most_groups(int tokens, int halves) {
  return halves == 1 ? 2 : tokens <= 64 ? 5 : tokens <= 128 ? 4 : 3;
}

template <int kTokens, int kHalves, int kGroups = 1, class... Arguments>
void launch_groups(int groups, Arguments... arguments) {
  if (groups == kGroups) launch_tiles<kTokens, kGroups, kHalves>(arguments...);
  else if constexpr (kGroups < most_groups(kTokens, kHalves))
    launch_groups<kTokens, kHalves, kGroups + 1>(groups, arguments...);
}

template <int kHalves>
void multiply(TensorView x_TI, TensorView weight, int rows, int parts, const Result& result) {
  if (result.tokens == 0) return;
  auto whole = [](int64_t number, int part) { return static_cast<int>((number + part - 1) / part); };
  int groups = whole(rows * kHalves, kRows);
  TVM_FFI_CHECK(groups <= most_groups(result.tokens, kHalves), ValueError)
      << "a tile of " << rows * kHalves << " rows and " << result.tokens << " tokens is too large";
  Tiles tiles;
  tiles.side_by_side = whole(result.outputs, rows);
  tiles.rows = rows;
  tiles.parts = parts;
  tiles.stages = whole(x_TI.size(1), kInputs);
  tiles.token_rows = whole(result.tokens, 8) * 8;
  TVM_FFI_CHECK(parts <= tiles.stages, ValueError)
      << parts << " parts, but there are " << tiles.stages << " times 64 inputs";
  DLDevice device = x_TI.device();
  CUtensorMap x = map_of_boxes(x_TI, tiles.token_rows), w = map_of_boxes(weight, rows);
  if (result.tokens <= 16) launch_groups<16, kHalves>(groups, device, x, w, tiles, result);
  else if (result.tokens <= 64) launch_groups<64, kHalves>(groups, device, x, w, tiles, result);
  else if (result.tokens <= 128) launch_groups<128, kHalves>(groups, device, x, w, tiles, result);
  else launch_groups<192, kHalves>(groups, device, x, w, tiles, result);
}

}  // namespace

void row_tiles(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView parts_XTO,
               int rows) {
  int parts = static_cast<int>(parts_XTO.size(0));
  Result result{};
  if (parts > 1) result.parts = data_of<float>(parts_XTO);
  else result.sums = data_of<Numbers>(parts_XTO);
  if (bias_O.numel()) result.bias = data_of<const Numbers>(bias_O);
  result.tokens = static_cast<int>(x_TI.size(0));
  result.outputs = static_cast<int>(weight_OI.size(0));
  multiply<1>(x_TI, weight_OI, rows, parts, result);
}

void row_tiles_silu(TensorView x_TI, TensorView weight_UI, TensorView y_TF, int rows) {
  Result result{};
  result.sums = data_of<Numbers>(y_TF);
  result.tokens = static_cast<int>(x_TI.size(0));
  result.outputs = static_cast<int>(y_TF.size(1));
  multiply<2>(x_TI, weight_UI, rows, 1, result);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(row_tiles, row_tiles);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(row_tiles_silu, row_tiles_silu);
