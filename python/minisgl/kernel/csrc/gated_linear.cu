// The product of a few tokens with the gate and up projections of an MLP, and the activation. Of small
// weights, small_linear.cu. The contract stands in linear.py.

#include "launch.cuh"
#include "linear_groups.cuh"

void few_token_silu(TensorView x_TI, TensorView weight_UI, TensorView y_TF) {
  multiply_groups_of<true>(Product(x_TI, weight_UI, y_TF), x_TI.device());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_token_silu, few_token_silu);
