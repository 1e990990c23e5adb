// The product of a few tokens with a small weight; alone, or of the gate and up projections of an
// MLP together with the activation.
//
// At most 16 tokens. A block has some rows of the weight, and its 8 warps divide their inputs among
// themselves. A warp loads its numbers of the weight before it waits for the tokens, so memory is
// busy while the kernel before this one ends. They go to the tensor cores as they lie: any order of
// the inputs gives the same product, so a thread loads 16 bytes of a row and uses them as its words
// of fragments. The sums of the warps are added up in a fixed order.
// The contract is in gpu_products.py.
//
// Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
// step, U both halves of a gated mlp.

#include <cstdint>

#include "launch.cuh"
#include "linear.cuh"

namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kPiece = 32;   // inputs that a warp multiplies at a time: 8 in each thread
constexpr int kTile = 8;     // rows of the weight in a fragment
constexpr int kTokens = 16;  // tokens in a fragment
constexpr int kMostRows = 48;

// The sums of each warp. Rows are padded, to avoid bank conflicts.
struct Sums {
  alignas(8) float of_warp[kWarps][kTokens][kMostRows + 8];
};

// Not inside the template of the kernel, where the tests' stand-in for CUDA would not find it.
__device__ Sums& shared_sums() {
  __shared__ Sums sums;
  return sums;
}

// A block computes kTiles tiles of 8 outputs. If kIsGated, it computes half as many, since an
// output needs a row of gate and a row of up. A warp loads kAhead pieces of its rows before it
// waits for the tokens.
template <int kTiles, int kAhead, bool kIsGated>
__global__ void __launch_bounds__(kThreads, 1)  // one block, so that threads have enough registers
    multiply_at_once(const Product in) {
  constexpr int kOutputs = kTile * kTiles / (kIsGated ? 2 : 1);
  Sums& sums = shared_sums();
  int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  int first = blockIdx.x * kOutputs;

  // Past the end of rows, tokens or inputs the last ones are loaded, so that loads need no branch.
  // Outputs of rows and tokens past the end are not written; inputs past the end count as zero.
  auto inputs_at = [&](auto load, const uint16_t* row, int round) {
    int i = (round * kWarps + warp) * kPiece + 8 * column;
    uint4 numbers = load(reinterpret_cast<const uint4*>(row + min(i, in.inputs - 8)));
    return i < in.inputs ? numbers : uint4{};
  };
  auto weight_at = [&](int round, int tile) {
    int of_tile = kIsGated ? tile % (kTiles / 2) : tile;
    int64_t row = min(first + kTile * of_tile + group, in.outputs - 1);
    if (kIsGated && tile >= kTiles / 2) row += in.outputs;
    return inputs_at(load_constant, in.weight + row * in.weight_stride, round);
  };
  auto token_at = [&](int round, int half) {
    int64_t token = min(kTokens / 2 * half + group, in.tokens - 1);
    return inputs_at(load_fresh<uint4>, in.x + token * in.x_stride, round);
  };

  uint4 weight[kAhead][kTiles], x[kAhead][2];
#pragma unroll
  for (int round = 0; round < kAhead; ++round)
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) weight[round][tile] = weight_at(round, tile);
  wait_for_inputs();
  let_next_start();

  float sum[kTiles][2][4] = {};  // separate for the halves of a piece: no product waits for another
  auto add = [&](const uint4(&weight)[kTiles], const uint4(&x)[2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      multiply(sum[tile][0], {x[0].x, x[1].x, x[0].y, x[1].y}, {weight[tile].x, weight[tile].y});
      multiply(sum[tile][1], {x[0].z, x[1].z, x[0].w, x[1].w}, {weight[tile].z, weight[tile].w});
    }
  };
#pragma unroll
  for (int round = 0; round < kAhead; ++round)
    for (int half = 0; half < 2; ++half) x[round][half] = token_at(round, half);
#pragma unroll
  for (int round = 0; round < kAhead; ++round) add(weight[round], x[round]);
  int num_rounds = (in.inputs + kWarps * kPiece - 1) / (kWarps * kPiece);
#pragma unroll 4
  for (int round = kAhead; round < num_rounds; ++round) {
    uint4 more[kTiles], more_x[2] = {token_at(round, 0), token_at(round, 1)};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) more[tile] = weight_at(round, tile);
    add(more, more_x);
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* place = &sums.of_warp[warp][kTokens / 2 * half + group][kTile * tile + 2 * column];
      *reinterpret_cast<float2*>(place) = {sum[tile][0][2 * half] + sum[tile][1][2 * half],
                                           sum[tile][0][2 * half + 1] + sum[tile][1][2 * half + 1]};
    }
  __syncthreads();
#pragma unroll 1  // fetching unrolled code, which runs once, takes longer than the loop
  for (int i = threadIdx.x; i < kTokens * kOutputs; i += kThreads) {
    int token = i / kOutputs, output = i % kOutputs;
    if (token >= in.tokens || first + output >= in.outputs) continue;
    auto total = [&](int row) {
      float total = 0;
      for (int w = 0; w < kWarps; ++w) total += sums.of_warp[w][token][row];
      return total;
    };
    float y = total(output);
    if constexpr (kIsGated) y = silu_and_mul(y, total(kOutputs + output));
    in.write(token, first + output, y);
  }
}

void start(const Product& in, DLDevice device, int outputs_of_block, void (*kernel)(Product)) {
  if (in.tokens == 0 || in.outputs == 0) return;
  int num_blocks = (in.outputs + outputs_of_block - 1) / outputs_of_block;
  launch(device, num_blocks, kThreads, kernel, in);
}

}  // namespace

void small_linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  Product in(x_TI, weight_OI, bias_O, y_TO);
  // A block has few rows, so that each multiprocessor has a block. All rounds are loaded before the
  // wait if a thread has registers for them.
  int num_rounds = (in.inputs + kWarps * kPiece - 1) / (kWarps * kPiece);
  if (num_rounds <= 4 && in.outputs > 2048) {
    start(in, x_TI.device(), 32, multiply_at_once<4, 4, false>);
  } else if (num_rounds <= 8) {
    start(in, x_TI.device(), 8, multiply_at_once<1, 8, false>);
  } else {
    start(in, x_TI.device(), 8, multiply_at_once<1, 12, false>);
  }
}

void small_silu(TensorView x_TI, TensorView weight_UI, TensorView y_TF) {
  start(Product(x_TI, weight_UI, y_TF), x_TI.device(), 24, multiply_at_once<6, 4, true>);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(small_linear, small_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(small_silu, small_silu);
