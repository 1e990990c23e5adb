// The smallest logit that a request's filters keep, without a sort: a bfloat16 has few values, so
// the kernel counts them.
//
// The reference and the contract are in filters.py. A block of threads takes a row. It counts the
// values in bins, which are ordered as the values are. Then each thread sums up a few bins, the
// first thread those of the highest values. Sums have a fixed order, so equal rows give equal
// results.

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <cmath>
#include <cstdint>

namespace {

using tvm::ffi::TensorView;

constexpr int kThreads = 1024, kBinsOfThread = 7, kBins = kThreads * kBinsOfThread;

// A bin is a value of either sign in the 27 octaves from 2^-15 to 2^12, or zero in the middle.
// Smaller magnitudes count as zero. Larger ones, infinities and NaNs count as the value at their
// end.
constexpr int kBelow = ((127 - 15) << 7) - 1, kZero = 27 << 7;
static_assert(2 * kZero < kBins);

__device__ int bin_of(uint32_t bits) {
  int above = min(max(static_cast<int>(bits & 0x7fff) - kBelow, 0), kZero);
  return bits & 0x8000 ? kZero - above : kZero + above;
}

__device__ float magnitude_of(int bin) { return __int_as_float((kBelow + abs(bin - kZero)) << 16); }

__device__ float value_of(int bin) {
  return bin == kZero ? 0.0f : copysignf(magnitude_of(bin), float(bin - kZero));
}

// The smallest logit that falls into a bin.
__device__ float smallest_of(int bin) {
  return bin == 0 ? -INFINITY : bin > kZero ? magnitude_of(bin) : -magnitude_of(bin);
}

__device__ void count_values(const uint16_t* row, int size, int* count) {
  // The logits before the first address that is a multiple of 16 bytes.
  int head = min(static_cast<int>(-(reinterpret_cast<uintptr_t>(row) / 2) % 8), size);
  int num_vectors = (size - head) / 8, tail = head + 8 * num_vectors, i = threadIdx.x;
  if (i < head) atomicAdd(&count[bin_of(row[i])], 1);
  if (i < size - tail) atomicAdd(&count[bin_of(row[tail + i])], 1);
  auto vectors = reinterpret_cast<const uint4*>(row + head);
  uint4 next = i < num_vectors ? vectors[i] : uint4{};
  while (i < num_vectors) {
    uint32_t words[] = {next.x, next.y, next.z, next.w};
    i += kThreads;
    if (i < num_vectors) next = vectors[i];  // the load overlaps the counting
#pragma unroll
    for (uint32_t word : words) {
      atomicAdd(&count[bin_of(word & 0xffff)], 1);
      atomicAdd(&count[bin_of(word >> 16)], 1);
    }
  }
}

// Returns the sum of x over the threads before this one; `total` becomes the sum over all threads.
// `sum_of_warps` is in shared memory.
template <class T>
__device__ T sum_before(T x, T* sum_of_warps, T& total) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = x, before = 0;
  for (int step = 1; step < 32; step *= 2) {
    T other = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sum_of_warps[warp] = sum;
  __syncthreads();
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) before = total;
    total += sum_of_warps[w];
  }
  return before + (sum - x);
}

__global__ void __launch_bounds__(kThreads, 2)
    find_lowest(const uint16_t* logits, int64_t stride, int vocab_size, const float* temperature,
                const int* top_k, const float* top_p, const float* min_p, float* lowest) {
  __shared__ int count[kBins], num_of_warps[kThreads / 32], top, border;
  __shared__ double mass_of_warps[kThreads / 32];
  int b = blockIdx.x, k = top_k[b];
  float t = temperature[b], p = top_p[b], q = min_p[b];
  if (t == 0 || (k >= vocab_size && p >= 1 && q <= 0)) {
    if (threadIdx.x == 0) lowest[b] = -INFINITY;
    return;
  }
  for (int i = threadIdx.x; i < kBins; i += kThreads) count[i] = 0;
  if (threadIdx.x == 0) top = border = kBins - 1;
  __syncthreads();
  count_values(logits + b * stride, vocab_size, count);
  __syncthreads();

  int first = kBins - 1 - threadIdx.x * kBinsOfThread, num = 0, num_all;
  for (int i = 0; i < kBinsOfThread; ++i) num += count[first - i];
  int num_before = sum_before(num, num_of_warps, num_all);
  if (num > 0 && num_before == 0) {
    int bin = first;
    while (count[bin] == 0) --bin;
    top = bin;
  }
  __syncthreads();

  // Calls f for each of this thread's bins that has tokens in the top k: with the bin, the number
  // of tokens in higher bins, the score of its tokens, and the weight of those in the top k. Scores
  // and weights are relative to those of the largest logit.
  auto for_kept_by_top_k = [&](auto f) {
    int seen = num_before;
    for (int i = 0; i < kBinsOfThread; ++i) {
      int bin = first - i, n = min(count[bin], k - seen);
      float score = (value_of(bin) - value_of(top)) / fmaxf(t, 1e-30f);
      if (n > 0) f(bin, seen, score, n * double(expf(score)));
      seen += count[bin];
    }
  };
  double mass = 0, mass_all;
  for_kept_by_top_k([&](int, int, float, double mass_of_bin) { mass += mass_of_bin; });
  double mass_before = sum_before(mass, mass_of_warps, mass_all);
  float least = q > 0 ? logf(q) : -INFINITY;
  for_kept_by_top_k([&](int bin, int seen, float score, double mass_of_bin) {
    bool is_in_top_p = mass_before < p * mass_all || p >= 1 || seen == 0;
    if (is_in_top_p && score >= least) atomicMin(&border, bin);
    mass_before += mass_of_bin;
  });
  __syncthreads();
  if (threadIdx.x == 0) lowest[b] = smallest_of(border);
}

template <class T>
T* data_of(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

}  // namespace

void lowest_kept(TensorView logits_BV, TensorView temperature_B, TensorView top_k_B,
                 TensorView top_p_B, TensorView min_p_B, TensorView lowest_B) {
  DLDevice device = logits_BV.device();
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(logits_BV.size(0)));
  config.blockDim = dim3(kThreads);
  auto stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  config.stream = static_cast<cudaStream_t>(stream);
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(
      &config, find_lowest, data_of<const uint16_t>(logits_BV), logits_BV.stride(0),
      static_cast<int>(logits_BV.size(1)), data_of<const float>(temperature_B),
      data_of<const int>(top_k_B), data_of<const float>(top_p_B), data_of<const float>(min_p_B),
      data_of<float>(lowest_B)));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lowest_kept, lowest_kept);
