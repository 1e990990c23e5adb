// Starts the kernel of paged.cu.
#ifndef __CUDA_ARCH__  // nothing in here runs on a GPU
#include "launch.cuh"

extern "C" const unsigned char prompts_paged_cubin[];  // see cubins.S

namespace prompts {

static cudaKernel_t kernel() {
  static cudaKernel_t loaded = load_kernel(prompts_paged_cubin);
  return loaded;
}

void load_paged() { kernel(); }

void run_paged(const Step& step, const Pages& pages) {
  launch<Paged>(step,
                {data_of(step.q), rows_of(step.q), data_of(step.k), rows_of(step.k),
                 data_of(step.v), rows_of(step.v), pages.indices, step.window_left,
                 pages.k_stride, pages.v_stride, pages.size, {step.softcap, step.scale}},
                kernel());
}

}  // namespace prompts
#endif  // __CUDA_ARCH__
