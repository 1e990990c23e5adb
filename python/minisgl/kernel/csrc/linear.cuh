// The common part of the kernels for products of a few tokens.
//
// Dimensions: F mlp width, I inputs of a linear layer, O outputs of a linear layer, T tokens of a
// step, U both halves of a gated mlp.

#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>

#include "launch.cuh"
#include <ptx.cuh>

using tvm::ffi::TensorView;

struct Product {
  const uint16_t* x;
  const uint16_t* weight;
  const uint16_t* bias;  // may be null
  uint16_t* y;
  int64_t x_stride, weight_stride, y_stride;
  int tokens, inputs, outputs;

  Product(TensorView x_TI, TensorView weight_OI, TensorView y_TO)
      : x(data_of<const uint16_t>(x_TI)),
        weight(data_of<const uint16_t>(weight_OI)),
        bias(nullptr),
        y(data_of<uint16_t>(y_TO)),
        x_stride(x_TI.stride(0)),
        weight_stride(weight_OI.stride(0)),
        y_stride(y_TO.stride(0)),
        tokens(static_cast<int>(x_TI.size(0))),
        inputs(static_cast<int>(x_TI.size(1))),
        outputs(static_cast<int>(y_TO.size(1))) {}

  Product(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO)
      : Product(x_TI, weight_OI, y_TO) {
    if (bias_O.numel()) bias = data_of<const uint16_t>(bias_O);
  }

  __device__ void write(int token, int output, float sum) const {
    float of_bias = bias ? bfloat16_to_float(bias[output]) : 0.0f;
    y[token * y_stride + output] = static_cast<uint16_t>(pack(of_bias + sum, 0.0f));
  }
};

// The activation of a gated MLP. Gate and up are rounded to bfloat16, as if they had been stored.
__device__ inline float silu_and_mul(float gate, float up) {
  auto rounded = [](float x) {
    return bfloat16_to_float(static_cast<uint16_t>(pack(x, 0.0f)));
  };
  float x = rounded(gate);
  return x / (1 + expf(-x)) * rounded(up);
}

// The same where nothing is multiplied meanwhile: with the other one, 16,384 tokens of Qwen3-0.6B took
// a sixth longer in gated_tiles.cu. The exponential and the quotient are approximations of float32,
// far finer than a bfloat16.
__device__ inline float fast_silu_and_mul(float gate, float up) {
  uint32_t rounded = pack(gate, up);
  float x = __uint_as_float(rounded << 16);
  return __fdividef(x, 1 + __expf(-x)) * __uint_as_float(rounded & 0xffff0000);
}
