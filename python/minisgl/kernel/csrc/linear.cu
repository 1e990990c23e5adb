// The product of a few tokens with a weight. Of small weights, small_linear.cu. The contract stands in
// linear.py.

#include "launch.cuh"
#include "linear_groups.cuh"

void few_token_linear(TensorView x_TI, TensorView weight_OI, TensorView bias_O, TensorView y_TO) {
  multiply_groups_of<false>(Product(x_TI, weight_OI, bias_O, y_TO), x_TI.device());
}

// 0 where a block's shared memory is too small. More inputs than a block takes need a cluster.
int64_t most_inputs_of_few_tokens(TensorView on_device) {
  int device = on_device.device().device_id;
  if (most_shared_memory(device) < sizeof(Shared<2 * kFragment, kMostRounds>)) return 0;
  return kMostRounds * kRound * (has_clusters(device) ? kMostParts : 1);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_token_linear, few_token_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_inputs_of_few_tokens, most_inputs_of_few_tokens);
