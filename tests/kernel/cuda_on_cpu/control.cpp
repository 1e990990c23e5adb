// The functions by which tests control the stand-in.

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

using tvm::ffi::TensorView;

// Sets how many blocks run at once. They run in order if the seed is 0, else in an order that it
// draws, with threads that fall behind.
void set_blocks(int64_t seed, int64_t num_together) {
  cuda_on_cpu::seed = static_cast<uint64_t>(seed);
  cuda_on_cpu::num_together = static_cast<size_t>(num_together);
}

// Sets for how many turns a thread falls behind its block at most. Between two points at which a block
// meets, its warps may have hundreds of their own.
void set_most_behind(int64_t num_turns) {
  cuda_on_cpu::most_behind_block = static_cast<unsigned>(num_turns);
}

// Makes the contiguous `place` hold `value` only when a block has waited for its inputs, until
// `forget_late`.
void arrives_late(TensorView place, TensorView value) {
  size_t num_bytes = static_cast<size_t>(place.numel()) * place.dtype().bits / 8;
  auto to = static_cast<char*>(place.data_ptr()), from = static_cast<char*>(value.data_ptr());
  cuda_on_cpu::late_inputs.push_back({to, {from, from + num_bytes}, {to, to + num_bytes}});
}

void forget_late() { cuda_on_cpu::late_inputs.clear(); }

// Puts the launches from here on on that stream, of so many, until `run_streams`.
void use_stream(int64_t stream, int64_t num_streams) {
  cuda_on_cpu::streams.resize(static_cast<size_t>(num_streams));
  cuda_on_cpu::current_stream = &cuda_on_cpu::streams[static_cast<size_t>(stream)];
}

void run_streams() { cuda_on_cpu::run_streams(); }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_stream, use_stream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_streams, run_streams);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_blocks, set_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_most_behind, set_most_behind);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(arrives_late, arrives_late);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget_late, forget_late);
