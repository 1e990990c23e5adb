// Starts the kernel of ragged.cu.
#ifndef __CUDA_ARCH__  // nothing in here runs on a GPU
#include "launch.cuh"

extern "C" const unsigned char prompts_ragged_cubin[];  // see cubins.S

namespace prompts {

static cudaKernel_t kernel() {
  static cudaKernel_t loaded = load_kernel(prompts_ragged_cubin);
  return loaded;
}

void load_ragged() { kernel(); }

void run_ragged(const Step& step) {
  launch<Ragged>(step,
                 {data_of(step.q), rows_of(step.q), data_of(step.k), rows_of(step.k),
                  data_of(step.v), rows_of(step.v), step.window_left, {step.softcap, step.scale}},
                 kernel());
}

}  // namespace prompts
#endif  // __CUDA_ARCH__
