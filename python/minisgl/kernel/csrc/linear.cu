// The product of a few tokens with a weight, which is bound by reading the weight.
//
// At most 16 tokens. A block has 16 or 32 rows of the weight, and its 8 warps divide their inputs
// among themselves. A warp asks for its numbers of the weight before it waits for the tokens, so
// memory is busy while the kernel before this one ends. They go to the tensor cores as they lie:
// any order of the inputs gives the same product, so a thread loads 16 bytes of a row and uses them
// as its words of fragments. The sums of the warps are added up in a fixed order. The contract
// stands in linear.py.
//
// Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>

#include "launch.cuh"
#include <ptx.cuh>

namespace {

using tvm::ffi::TensorView;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kPiece = 32;  // inputs that a warp multiplies at once: 8 a thread

struct Product {
  const uint16_t* x;
  const uint16_t* weight;
  const uint16_t* bias;  // may be null
  uint16_t* y;
  int64_t x_stride, weight_stride, y_stride;
  int tokens, inputs, outputs;
};

// The words of a fragment of 16 inputs, of the 32 that two threads' vectors have.
__device__ uint4 weight_fragment(uint4 upper, uint4 lower, int half) {
  if (half) return {upper.z, lower.z, upper.w, lower.w};
  return {upper.x, lower.x, upper.y, lower.y};
}

__device__ uint2 token_fragment(uint4 x, int half) {
  return half ? uint2{x.z, x.w} : uint2{x.x, x.y};
}

// kRowTiles of 16 rows a block, kTokenTiles of 8 tokens; a warp loads kAhead pieces of its rows
// before it waits for the tokens.
template <int kRowTiles, int kTokenTiles, int kAhead>
__global__ void __launch_bounds__(kThreads) multiply_few(const Product in) {
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  __shared__ float sum_of_warps[kWarps][kTokens][kRows];
  int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  int first_row = blockIdx.x * kRows;

  auto first_input = [&](int round) { return (round * kWarps + warp) * kPiece + 8 * column; };
  auto weight_at = [&](int round, int row_tile, int half) {
    int row = first_row + 16 * row_tile + 8 * half + group, i = first_input(round);
    if (row >= in.outputs || i >= in.inputs) return uint4{};
    return load_constant(reinterpret_cast<const uint4*>(in.weight + row * in.weight_stride + i));
  };
  auto token_at = [&](int round, int token_tile) {
    int token = 8 * token_tile + group, i = first_input(round);
    if (token >= in.tokens || i >= in.inputs) return uint4{};
    return load_fresh(reinterpret_cast<const uint4*>(in.x + token * in.x_stride + i));
  };

  uint4 ahead[kAhead][kRowTiles][2];
#pragma unroll
  for (int round = 0; round < kAhead; ++round)
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      ahead[round][r][0] = weight_at(round, r, 0);
      ahead[round][r][1] = weight_at(round, r, 1);
    }
  wait_for_inputs();
  let_next_start();

  float sum[kRowTiles][kTokenTiles][4] = {};
  auto add = [&](int round, const uint4(&weight)[kRowTiles][2]) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      uint4 x = token_at(round, t);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          multiply(sum[r][t], weight_fragment(weight[r][0], weight[r][1], half),
                   token_fragment(x, half));
    }
  };
#pragma unroll
  for (int round = 0; round < kAhead; ++round) add(round, ahead[round]);
  int num_rounds = (in.inputs + kWarps * kPiece - 1) / (kWarps * kPiece);
#pragma unroll 4
  for (int round = kAhead; round < num_rounds; ++round) {
    uint4 weight[kRowTiles][2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      weight[r][0] = weight_at(round, r, 0);
      weight[r][1] = weight_at(round, r, 1);
    }
    add(round, weight);
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum_of_warps[warp][8 * t + 2 * column + i % 2][16 * r + 8 * (i / 2) + group] =
            sum[r][t][i];
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kRows; i += kThreads) {
    int token = i / kRows, row = first_row + i % kRows;
    if (token >= in.tokens || row >= in.outputs) continue;
    float total = in.bias ? bfloat16_to_float(in.bias[row]) : 0.0f;
    for (int w = 0; w < kWarps; ++w) total += sum_of_warps[w][token][i % kRows];
    in.y[token * in.y_stride + row] = static_cast<uint16_t>(pack(total, 0.0f));
  }
}

template <int kRowTiles, int kAhead>
auto kernel_for(int num_tokens) {
  return num_tokens <= 8 ? multiply_few<kRowTiles, 1, kAhead>
                         : multiply_few<kRowTiles, 2, kAhead>;
}

}  // namespace

void few_token_linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  Product in{data_of<const uint16_t>(x_TI),
             data_of<const uint16_t>(weight_OI),
             bias_O.numel() ? data_of<const uint16_t>(bias_O) : nullptr,
             data_of<uint16_t>(y_TO),
             x_TI.stride(0),
             weight_OI.stride(0),
             y_TO.stride(0),
             static_cast<int>(x_TI.size(0)),
             static_cast<int>(x_TI.size(1)),
             static_cast<int>(weight_OI.size(0))};
  // Short rows are asked for whole, and two at a time.
  int num_rounds = (in.inputs + kWarps * kPiece - 1) / (kWarps * kPiece);
  auto kernel = num_rounds <= 4   ? kernel_for<2, 4>(in.tokens)
                : num_rounds <= 8 ? kernel_for<1, 8>(in.tokens)
                                  : kernel_for<1, 12>(in.tokens);
  int rows = num_rounds <= 4 ? 32 : 16;
  launch(x_TI.device(), (in.outputs + rows - 1) / rows, kThreads, kernel, in);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_token_linear, few_token_linear);
