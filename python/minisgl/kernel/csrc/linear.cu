// The product of a few tokens with a weight. Of small weights, small_linear.cu. The contract stands in
// linear.py.

#include "launch.cuh"
#include "linear_groups.cuh"

void few_token_linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  multiply_groups_of<false>(Product(x_TI, weight_OI, bias_O, y_TO), x_TI.device());
}

// More inputs than a block takes need a cluster of blocks.
int64_t most_inputs_of_few_tokens(TensorView on_device) {
  return kMostRounds * kRound * (has_clusters(on_device.device().device_id) ? kMostParts : 1);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_token_linear, few_token_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_inputs_of_few_tokens, most_inputs_of_few_tokens);
