// The product of some tokens with a large weight, on Hopper. The contract is in gpu_products.py.
//
// Such a product is bound by reading the weight. A block computes one tile: some rows of the weight,
// for all tokens and a part of the inputs. Boxes of the weight and of the tokens are copied to shared
// memory as far ahead as there is room; those of the weight begin before the kernel before this one
// has ended. The weight is read once, so it leaves the L2 cache first: on an H200, 128 tokens with
// 17,408 inputs and 5,120 outputs took 57 µs without that, and 54 with it.
//
// All tiles read all tokens. Where these are many, they are more than a tile's rows of the weight. So
// the blocks of a cluster, whose tiles are neighbours, each copy a share of the tokens to all.
//
// In the products the tokens are rows, 64 of a warpgroup, and the weight's rows are columns.
//
// Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
// step, U both halves of a gated mlp, X a selection out of another dimension: parts of the inputs.

#include <algorithm>

#include <hopper.cuh>

#include "launch.cuh"
#include "linear.cuh"
#include "stages.cuh"

namespace {

constexpr int kTokens = 64;       // of a warpgroup
constexpr int kMostGroups = 3;    // warpgroups that multiply
constexpr int kMostColumns = 256;  // of a product
constexpr int kInputs = 64;       // of a stage: 128 bytes, as many as are swizzled
constexpr int kCluster = 2;       // blocks
constexpr int kMostStages = 16;   // more do not help
constexpr int kAlignment = 1024;  // of what is swizzled
constexpr int kRoom = 225 << 10;  // for stages
constexpr int kPiece = 8;         // outputs or inputs that a thread writes at a time

using Numbers = uint16_t;

// The last warps have copies made, each by one of its threads: the first of them those of the weight,
// and the second those of the tokens.
constexpr int kCopyingWarps = 2;

template <int kGroups>
constexpr int kThreads = kGroups * kWarpgroup + kCopyingWarps * 32;

// kGroups: warpgroups that multiply. kColumns: of a product, at least the rows of a tile in each half
// of the weight.
template <int kGroups, int kColumns, int kHalves>
struct Stage {
  Numbers x[kGroups * kTokens][kInputs];
  Numbers weight[kHalves][kColumns][kInputs];
};

// A row of sums, such that the threads of a warp, which write two numbers of eight rows, write to all
// banks: its length is 8 or 24 beyond a multiple of 32.
constexpr int padded(int columns) { return columns % 16 == 0 ? columns + 8 : columns; }

template <int kGroups, int kColumns, int kHalves>
struct Shared {
  using Stage = ::Stage<kGroups, kColumns, kHalves>;
  static constexpr int kStages = std::min<int>(kMostStages, kRoom / sizeof(Stage));
  static_assert(kStages >= 2);  // a stage is given back while the next one is multiplied

  union {
    Stage stages[kStages];
    // Once all stages have been multiplied.
    alignas(16) float sums[kGroups * kTokens][padded(kHalves * kColumns)];
  };
  uint64_t is_full[kStages], is_empty[kStages];
};

struct Tiles {
  int side_by_side;   // of the same part of the inputs: a multiple of the cluster's size
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

// The tile of a block. The last one may lie outside.
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

// What one thread of each copying warp does: it has boxes copied wherever there is room.
template <int kHalves, class Shared>
struct Copier {
  Shared& shared;
  const CUtensorMap& x;
  const CUtensorMap& weight;
  const Tiles& tiles;
  const Tile& tile;
  int outputs;

  __device__ void copy_weight() const {
    for_each_stage(kHalves * tiles.rows, [&](int input, Stage& stage, uint64_t* is_full) {
      for (int half = 0; half < kHalves; ++half)
        begin_streamed_copy(stage.weight[half], weight, input, half * outputs + tile.output,
                            is_full);
    });
  }

  // This block's share of them, to all blocks of the cluster.
  __device__ void copy_tokens() const {
    int token = blockIdx.x % kCluster * tiles.token_rows;
    for_each_stage(kCluster * tiles.token_rows, [&](int input, Stage& stage, uint64_t* is_full) {
      begin_copy_to_cluster<kCluster>(stage.x[token], x, input, token, is_full);
    });
  }

 private:
  using Stage = typename Shared::Stage;

  // `num_rows`: that the block gets.
  template <class Copy>
  __device__ void for_each_stage(int num_rows, Copy copy) const {
    Turn<Shared::kStages> turn;
    for (int i = 0; i < tile.stages; ++i, turn.go_on()) {
      wait_for_phase(&shared.is_empty[turn.stage], turn.phase ^ 1);
      arrive_and_expect(&shared.is_full[turn.stage], num_rows * kInputs * 2);
      copy((tile.stage + i) * kInputs, shared.stages[turn.stage], &shared.is_full[turn.stage]);
    }
  }
};

// A thread's sums. Both halves are columns of one product if it may have so many.
template <int kColumns, int kHalves>
struct Sums {
  static constexpr int kProducts = kHalves * kColumns > kMostColumns ? kHalves : 1;
  static constexpr int kWidth = kHalves * kColumns / kProducts;

  float of_product[kProducts][kWidth / 2];
};

template <int kColumns, int kHalves, class Shared>
__device__ void multiply_tile(Shared& shared, const Tile& tile, int group,
                              Sums<kColumns, kHalves>& sums) {
  using Sums = ::Sums<kColumns, kHalves>;
  int lane = threadIdx.x % 32;
  int last = 0;  // the stage that products may still read
  Turn<Shared::kStages> turn;
  for (int i = 0; i < tile.stages; ++i, turn.go_on()) {
    wait_for_phase(&shared.is_full[turn.stage], turn.phase);
    const auto& stage = shared.stages[turn.stage];
    uint64_t x = describe_matrix(stage.x[group * kTokens]);
    begin_products();
#pragma unroll
    for (int j = 0; j < kInputs / 16; ++j)
#pragma unroll
      for (int product = 0; product < Sums::kProducts; ++product) {
        uint64_t weight = describe_matrix(stage.weight[product]);
        multiply_64<Sums::kWidth>(sums.of_product[product], x + j * kNext16Inputs,
                                  weight + j * kNext16Inputs, i | j);
      }
    group_products();
    wait_for_products<1>();
    // Nobody arrives at a barrier of a block that may have ended: its copies wait for these alone.
    bool is_filled_again = i > 0 && i - 1 + Shared::kStages < tile.stages;
    if (is_filled_again && lane < kCluster) arrive_in_cluster(&shared.is_empty[last], lane);
    last = turn.stage;
  }
  wait_for_products<0>();
#pragma unroll
  for (auto& of_product : sums.of_product) read_now(of_product);
}

template <int kColumns, int kHalves, class Shared>
__device__ void share_sums(Shared& shared, const Sums<kColumns, kHalves>& sums) {
  constexpr int kWidth = Sums<kColumns, kHalves>::kWidth;
  int lane = threadIdx.x % 32;
  int token = threadIdx.x / 32 * 16 + lane / 4, row = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kHalves * kColumns / 2; i += 2) {
    const auto& of_product = sums.of_product[i / (kWidth / 2)];
    float* place = &shared.sums[token + i % 4 / 2 * 8][row + i / 4 * 8];
    reinterpret_cast<float2&>(*place) = {of_product[i % (kWidth / 2)],
                                         of_product[i % (kWidth / 2) + 1]};
  }
}

// Those of the warpgroup's tokens, with an activation if there are two halves.
template <int kColumns, int kHalves, class Shared>
__device__ void write_results(const Shared& shared, const Tiles& tiles, const Tile& tile,
                              const Result& result, int group) {
  int pieces = tiles.rows / kPiece, first = group * kTokens;
  int num_tokens = min(result.tokens - first, kTokens);
  for (int i = threadIdx.x % kWarpgroup; i < num_tokens * pieces; i += kWarpgroup) {
    int token = first + i / pieces, row = i % pieces * kPiece, output = tile.output + row;
    if (output >= result.outputs) continue;
    auto sums_from = [&](int first) {
      return reinterpret_cast<const Piece&>(shared.sums[token][first]);
    };
    Piece y = sums_from(row);
    if constexpr (kHalves == 2) {
      Piece up = sums_from(kColumns + row);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) y.at[j] = fast_silu_and_mul(y.at[j], up.at[j]);
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

// The rows behind those of the tokens are multiplied, too, and nobody reads the results. With zeros
// that takes less power: a step of 16 requests of Qwen3-14B on an H200 about 650 instead of 690 W.
template <int kGroups, class Shared>
__device__ void clear_rows_behind(Shared& shared, int num_rows) {
  constexpr int kPieces = kInputs / kPiece;  // of a row
  for (auto& stage : shared.stages)
    for (int i = num_rows * kPieces + threadIdx.x; i < kGroups * kTokens * kPieces;
         i += kGroups * kWarpgroup)
      reinterpret_cast<uint4&>(stage.x[i / kPieces][i % kPieces * kPiece]) = uint4{};
}

template <int kGroups, int kColumns, int kHalves>
__global__ void __launch_bounds__(kThreads<kGroups>, 1)
    multiply_row_tiles(const __grid_constant__ CUtensorMap x,
                       const __grid_constant__ CUtensorMap weight, const Tiles tiles,
                       const Result result) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  fail();
#else
  using Shared = ::Shared<kGroups, kColumns, kHalves>;
  auto begin = reinterpret_cast<uint64_t>(dynamic_shared());
  begin = (begin + kAlignment - 1) / kAlignment * kAlignment;
  auto& shared = *reinterpret_cast<Shared*>(begin);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      init_barrier(&shared.is_full[i], kCopyingWarps);
      init_barrier(&shared.is_empty[i], kCluster * kGroups * kWarpgroup / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  arrive_at_cluster_relaxed();
  Tile tile(tiles);
  int group = threadIdx.x / kWarpgroup;
  if (group == kGroups) {
    Copier<kHalves, Shared> copier{shared, x, weight, tiles, tile, result.outputs};
    bool copies = threadIdx.x % 32 == 0;
    if (threadIdx.x / 32 == kGroups * kWarpgroup / 32) {
      if (copies) copier.copy_weight();  // even before the kernel before this one has ended
      __syncwarp();
      wait_for_cluster();
    } else {
      wait_for_cluster();  // until all blocks have made their barriers
      if (copies) {
        wait_for_inputs();
        let_next_start();
        copier.copy_tokens();
      }
      __syncwarp();
    }
    arrive_at_cluster_relaxed();  // as below
    __syncthreads();
  } else {
    clear_rows_behind<kGroups>(shared, kCluster * tiles.token_rows);
    wait_for_cluster();
    Sums<kColumns, kHalves> sums;
    multiply_tile(shared, tile, group, sums);
    arrive_at_cluster_relaxed();
    __syncthreads();  // sums take the place of stages
    share_sums(shared, sums);
    sync_warpgroup(1 + group);
    write_results<kColumns, kHalves>(shared, tiles, tile, result, group);
    __syncwarp();
  }
  wait_for_cluster();  // until all blocks have what this one copied to them
#endif
}

template <int kGroups, int kColumns, int kHalves>
void launch_tiles(DLDevice device, const CUtensorMap& x, const CUtensorMap& weight,
                  const Result& result, const Tiles& tiles) {
  Start start;
  start.cluster = kCluster;
  start.shared = sizeof(Shared<kGroups, kColumns, kHalves>) + kAlignment;
  launch(start, device, tiles.side_by_side * tiles.parts, kThreads<kGroups>,
         multiply_row_tiles<kGroups, kColumns, kHalves>, x, weight, tiles, result);
}

int whole_number(int64_t number, int part) {
  return static_cast<int>((number + part - 1) / part);
}

// The most rows of a tile whose sums fit the registers.
constexpr int most_rows(int groups, int halves) {
  return halves == 1 ? 128 : groups <= 2 ? 136 : 72;
}

template <int kHalves, int kColumns, int kGroups, class... Arguments>
void launch_groups(int groups, Arguments... arguments) {
  if (groups == kGroups) launch_tiles<kGroups, kColumns, kHalves>(arguments...);
  else if constexpr (kGroups < kMostGroups && kColumns <= most_rows(kGroups + 1, kHalves))
    launch_groups<kHalves, kColumns, kGroups + 1>(groups, arguments...);
}

// With as many of the columns as the rows of a tile need.
template <int kHalves, int kColumns, int... kMoreColumns, class... Arguments>
void launch_columns(const Tiles& tiles, int groups, Arguments... arguments) {
  if (tiles.rows <= kColumns) launch_groups<kHalves, kColumns, 1>(groups, arguments..., tiles);
  else if constexpr (sizeof...(kMoreColumns) > 0)
    launch_columns<kHalves, kMoreColumns...>(tiles, groups, arguments...);
}

template <int kHalves>
void multiply(TensorView x_TI, TensorView weight, int rows, int parts, const Result& result) {
  if (result.tokens == 0) return;
  int groups = whole_number(result.tokens, kTokens);
  TVM_FFI_CHECK(groups <= kMostGroups && rows <= most_rows(groups, kHalves), ValueError)
      << "a tile of " << rows * kHalves << " rows and " << result.tokens << " tokens is too large";
  TVM_FFI_CHECK(rows % kPiece == 0 && result.outputs % kPiece == 0, ValueError)
      << rows << " rows and " << result.outputs << " outputs, but both have to be multiples of 8";
  Tiles tiles;
  tiles.side_by_side = whole_number(result.outputs, kCluster * rows) * kCluster;
  tiles.rows = rows;
  tiles.parts = parts;
  tiles.stages = whole_number(x_TI.size(1), kInputs);
  tiles.token_rows = whole_number(result.tokens, kCluster * 8) * 8;
  TVM_FFI_CHECK(parts <= tiles.stages, ValueError)
      << parts << " parts, but there are " << tiles.stages << " times 64 inputs";
  DLDevice device = x_TI.device();
  CUtensorMap x = map_of_boxes(x_TI, tiles.token_rows), w = map_of_boxes(weight, rows);
  if constexpr (kHalves == 1)
    launch_columns<1, 40, 64, 128>(tiles, groups, device, x, w, result);
  else
    launch_columns<2, 40, 56, 72, 112, 136>(tiles, groups, device, x, w, result);
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
