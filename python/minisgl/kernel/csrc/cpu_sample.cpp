// From logits to tokens: the filters top_k, top_p and min_p, and the choice by Gumbel noise.
//
// A filter reads a row in vectors, seven or fourteen times. Sorting it, or counting its numbers in
// a table one by one, takes longer.
//
// Dimensions: B requests of a step, V vocabulary.

#include <omp.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cpu.h"

namespace {

constexpr int64_t kBlock = 2048;   // tokens whose weights are added up as floats
constexpr int64_t kSegment = 256;  // tokens: SEGMENT_SIZE of kernel/sample.py
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- noise: see kernel/sample.py

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  return x ^ x >> 16;
}

// log x of a normal x > 0, in operations that a compiler vectorizes: S. Moshier's logf ("Cephes
// Mathematical Library"), with a relative error below 1e-6.
inline float log_positive(float x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;
  uint32_t u = std::bit_cast<uint32_t>(x) - kSqrtHalf;
  float n = static_cast<float>(static_cast<int32_t>(u) >> 23);  // x = 2^n * (1 + f)
  float f = std::bit_cast<float>((u & 0x7fffff) + kSqrtHalf) - 1.0f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float square = f * f;
  return n * 0.693359375f + (f + (p * f * square - n * 2.12194440e-4f - 0.5f * square));
}

inline float gumbel(uint32_t key, uint32_t number) {
  uint32_t bits = mix(mix(number ^ key) ^ key);
  float uniform = (static_cast<float>(static_cast<int32_t>(bits >> 9)) + 0.5f) * 0x1p-23f;
  return -log_positive(-log_positive(uniform));
}

uint32_t noise_key(const int32_t* seed_2, int32_t position) {
  return mix(uint32_t(seed_2[0]) ^ mix(uint32_t(seed_2[1]) ^ mix(uint32_t(position))));
}

// How a request chooses: see choose_tokens in kernel/sample.py.
struct Choice {
  float lowest, temperature;
  uint32_t key;

  Choice(const TensorView& lowest_B, const TensorView& temperature_B, const TensorView& seed_B2,
         const TensorView& position_B, int64_t b)
      : lowest(-kInfinity),
        temperature(item<float>(temperature_B, b)),
        key(noise_key(row<const int32_t>(seed_B2, b), item<int32_t>(position_B, b))) {
    if (temperature > 0 && lowest_B.numel()) lowest = item<float>(lowest_B, b);
  }

  // The logit, or minus infinity if the filters drop it. A NaN is dropped, too.
  float allowed(float logit) const { return logit >= lowest ? logit : -kInfinity; }

  // The first index of the largest score, after the noise of the numbers `first`, `first + step`
  // and so on is added, in place. No score is a NaN.
  int64_t best(float* score, int64_t length, uint32_t first, uint32_t step) const {
    if (temperature != 0) {
#pragma omp simd
      for (int64_t i = 0; i < length; ++i)
        score[i] += temperature * gumbel(key, first + step * uint32_t(i));
    }
    float top = -kInfinity;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < length; ++i) top = std::max(top, score[i]);
    return std::find(score, score + length, top) - score;
  }
};

inline float minus_infinity(float) { return -kInfinity; }
inline bf16 minus_infinity(bf16) { return static_cast<bf16>(0xff80); }

// The largest logit of a segment, and the sum of its weights, relative to that of the largest.
struct Weighed {
  float top, sum;
};

template <class T>
Weighed weigh(const T* logits, int64_t length, const Choice& choice) {
  // A shorter last segment is filled up, as it is on a rank that has padding behind it, so that its
  // weights are always added up in the same order.
  T filled[kSegment];
  if (length < kSegment) {
    std::fill(std::copy(logits, logits + length, filled), filled + kSegment, minus_infinity(T{}));
    logits = filled;
  }
  float top = -kInfinity;
#pragma omp simd reduction(max : top)
  for (int64_t v = 0; v < kSegment; ++v) top = std::max(top, get(logits[v]));  // skips NaNs
  top = choice.allowed(top);
  if (choice.temperature == 0 || std::abs(top) == kInfinity) return {top, 1};
  float sum = 0, scale = 1.0f / std::max(choice.temperature, 1e-30f);
#pragma omp simd reduction(+ : sum)
  for (int64_t v = 0; v < kSegment; ++v) {
    float x = get(logits[v]), weight = exp_nonpositive((x - top) * scale);
    sum += x >= choice.lowest ? weight : 0.0f;
  }
  return {top, sum};
}

// The best segment of a row, and its score.
std::pair<int64_t, float> choose_segment(const Weighed* segments, int64_t num_segments,
                                         uint32_t first_segment, const Choice& choice) {
  // Infinite scores stay infinite, whatever the noise.
  std::vector<float> score(num_segments);
#pragma omp simd
  for (int64_t s = 0; s < num_segments; ++s)
    score[s] = segments[s].top + choice.temperature * log_positive(segments[s].sum);
  int64_t best = choice.best(score.data(), num_segments, ~first_segment, -1);
  return {best, score[best]};
}

// The best token of a segment, counted from the segment's first.
template <class T>
int64_t choose_token(const T* logits, int64_t length, uint32_t first_token, const Choice& choice) {
  float score[kSegment];
#pragma omp simd
  for (int64_t v = 0; v < length; ++v) score[v] = choice.allowed(get(logits[v]));
  return choice.best(score, length, first_token, 1);
}

// ---- filters

// Maps numbers of T to integers in the same order, and back.
template <class T>
struct Key;
template <>
struct Key<float> {
  static int64_t of(float x) {
    int32_t bits = std::bit_cast<int32_t>(x);
    return bits ^ (bits >> 31 & 0x7fffffff);
  }
  static float value(int64_t key) {
    int32_t bits = static_cast<int32_t>(key);
    return std::bit_cast<float>(bits ^ (bits >> 31 & 0x7fffffff));
  }
};
template <>
struct Key<bf16> {
  static int64_t of(float x) {
    int16_t bits = static_cast<int16_t>(std::bit_cast<uint32_t>(x) >> 16);
    return bits ^ (bits >> 15 & 0x7fff);
  }
  static float value(int64_t key) {
    int16_t bits = static_cast<int16_t>(key ^ (key >> 15 & 0x7fff));
    return get(static_cast<bf16>(bits));
  }
};

// The logits of a row, and the weights that the temperature gives them: 1 for the largest.
template <class T>
class Row {
 public:
  explicit Row(int64_t width)
      : width_(width), logit_(round_up(width, kFloats), -kInfinity), weight_(logit_.size()) {}

  void read(const T* logits, float temperature) {
    float top = -kInfinity, *logit = logit_.data(), *weight = weight_.data();
#pragma omp simd reduction(max : top)
    for (int64_t v = 0; v < width_; ++v) {
      logit[v] = get(logits[v]);
      top = std::max(top, logit[v]);
    }
    top_ = top;
    float scale = scale_ = 1.0f / std::max(temperature, 1e-30f);
#pragma omp simd
    for (int64_t v = 0; v < width_; ++v) {
      float x = logit[v] < top ? exp_nonpositive((logit[v] - top) * scale) : 1.0f;
      weight[v] = logit[v] <= top ? x : 0.0f;  // 0 for a NaN
    }
  }

  // The smallest logit that top_k, then top_p of what top_k leaves, and min_p keep.
  float lowest_kept(int64_t top_k, float top_p, float min_p) const {
    constexpr bool kCounts = true;
    float lowest = -kInfinity;
    double total = 0;
    if (top_k < width_) {
      lowest = smallest<kCounts>(double(top_k));
      if (top_p < 1) {
        double num_equal = double(top_k) - sums_above<kCounts>({lowest})[0];
        total = sums_above<!kCounts>({lowest})[0] + num_equal * weight_of(lowest);
      }
    } else if (top_p < 1) {
      total = sums_above<!kCounts>({-kInfinity})[0];
    }
    if (top_p < 1) lowest = std::max(lowest, smallest<!kCounts>(top_p * total));
    if (min_p > 0) lowest = std::max(lowest, smallest_likely(std::log(min_p)));
    return lowest;
  }

 private:
  static constexpr int kCuts = 4;
  using Cuts = std::array<float, kCuts>;
  using Sums = std::array<double, kCuts>;

  // The smallest logit above which the count, or the sum of weights, is less than `limit`; or the
  // largest logit. Each pass over the row compares with kCuts candidates.
  template <bool kCounts>
  float smallest(double limit) const {
    int64_t low = Key<T>::of(-kInfinity) - 1, high = Key<T>::of(top_);
    while (high - low > 1) {
      int64_t keys[kCuts];
      Cuts cuts;
      for (int i = 0; i < kCuts; ++i) {
        keys[i] = low + std::max<int64_t>((high - low) * (i + 1) / (kCuts + 1), 1);
        cuts[i] = Key<T>::value(keys[i]);
      }
      Sums sums = sums_above<kCounts>(cuts);
      for (int i = 0; i < kCuts && keys[i] < high; ++i)
        (sums[i] < limit ? high : low) = keys[i];
    }
    return Key<T>::value(high);
  }

  // For each cut, the count of larger logits, or the sum of their weights. Only the sums of a block
  // are
  // floats: in a longer sum of floats small weights would vanish.
  template <bool kCounts>
  Sums sums_above(const Cuts& cuts) const {
    Sums sums{};
    int64_t size = logit_.size();
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      Floats sum[kCuts] = {};
      for (int64_t v = begin; v < std::min(begin + kBlock, size); v += kFloats) {
        Floats x, weight = Floats{} + 1.0f;
        std::memcpy(&x, &logit_[v], sizeof(x));
        if (!kCounts) std::memcpy(&weight, &weight_[v], sizeof(weight));
        for (int i = 0; i < kCuts; ++i) sum[i] += x > cuts[i] ? weight : Floats{};
      }
      for (int i = 0; i < kCuts; ++i)
        for (int lane = 0; lane < kFloats; ++lane) sums[i] += sum[i][lane];
    }
    return sums;
  }

  float weight_of(float x) const { return x < top_ ? exp_nonpositive((x - top_) * scale_) : 1.0f; }

  float smallest_likely(float least_score) const {
    float lowest = top_, top = top_, scale = scale_;
    const float* logit = logit_.data();
#pragma omp simd reduction(min : lowest)
    for (int64_t v = 0; v < width_; ++v)
      lowest = std::min(lowest, (logit[v] - top) * scale >= least_score ? logit[v] : top);
    return lowest;
  }

  int64_t width_;
  std::vector<float> logit_, weight_;
  float top_ = 0, scale_ = 1;
};

}  // namespace

// The chosen token of each row, counted from the row's first one, and the score of its segment; -1
// where no logit may be chosen. The row's first token, `first_token`, begins a segment. lowest_B may
// have no elements.
void choose(TensorView logits_BV, TensorView lowest_B, TensorView temperature_B,
            TensorView seed_B2, TensorView position_B, int64_t first_token, TensorView token_B,
            TensorView score_B) {
  for_dtype(logits_BV, [&](auto zero) {
    using T = decltype(zero);
    int64_t num_rows = logits_BV.size(0), width = logits_BV.size(1);
    int64_t num_segments = (width + kSegment - 1) / kSegment;
    std::vector<Choice> choices;
    for (int64_t b = 0; b < num_rows; ++b)
      choices.emplace_back(lowest_B, temperature_B, seed_B2, position_B, b);
    auto length_of = [&](int64_t s) { return std::min(kSegment, width - s * kSegment); };
    std::vector<Weighed> segments(num_rows * num_segments);
#pragma omp parallel if (num_rows * width > kParallelWork)
    {
#pragma omp for collapse(2)
      for (int64_t b = 0; b < num_rows; ++b)
        for (int64_t s = 0; s < num_segments; ++s)
          segments[b * num_segments + s] =
              weigh(row<const T>(logits_BV, b) + s * kSegment, length_of(s), choices[b]);
#pragma omp for
      for (int64_t b = 0; b < num_rows; ++b) {
        auto [s, score] = choose_segment(&segments[b * num_segments], num_segments,
                                         first_token / kSegment, choices[b]);
        int64_t begin = s * kSegment;
        int64_t token = choose_token(row<const T>(logits_BV, b) + begin, length_of(s),
                                     uint32_t(first_token + begin), choices[b]);
        item<float>(score_B, b) = score;
        bool has_none = score == -kInfinity;
        item<int32_t>(token_B, b) = has_none ? -1 : static_cast<int32_t>(begin + token);
      }
    }
  });
}

// See kernel/filters.py; minus infinity where a row has no filter, or a temperature of 0.
void lowest_kept(TensorView logits_BV, TensorView temperature_B, TensorView top_k_B,
                 TensorView top_p_B, TensorView min_p_B, TensorView lowest_B) {
  for_dtype(logits_BV, [&](auto zero) {
    using T = decltype(zero);
    int64_t num_rows = logits_BV.size(0), width = logits_BV.size(1);
    std::vector<int64_t> filtered;
    for (int64_t b = 0; b < num_rows; ++b) {
      item<float>(lowest_B, b) = -kInfinity;
      bool has_filter = item<int32_t>(top_k_B, b) < width || item<float>(top_p_B, b) < 1 ||
                        item<float>(min_p_B, b) > 0;
      if (has_filter && item<float>(temperature_B, b) != 0) filtered.push_back(b);
    }
    int num_threads = std::clamp<int>(filtered.size(), 1, omp_get_max_threads());
#pragma omp parallel num_threads(num_threads)
    {
      Row<T> numbers(filtered.empty() ? 0 : width);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < filtered.size(); ++i) {
        int64_t b = filtered[i];
        numbers.read(row<const T>(logits_BV, b), item<float>(temperature_B, b));
        item<float>(lowest_B, b) = numbers.lowest_kept(
            item<int32_t>(top_k_B, b), item<float>(top_p_B, b), item<float>(min_p_B, b));
      }
    }
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(choose, choose);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lowest_kept, lowest_kept);
