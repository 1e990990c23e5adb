// Attention of single queries over a paged context, in blocks of keys that stay in a core's cache.
//
// A task has the queries of a token that share a kv head. They are too few to fill vectors, as
// cpu_prompt_attention.cpp does with the rows of a prompt, so the head width lies in lanes.
//
// Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, R rows of the
// tables, S kv slots, T tokens of a step.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_pages.h"

namespace {

constexpr Ints every_second(int first) {
  Ints order{};
  for (int i = 0; i < kFloats; ++i) order[i] = 2 * i + first;
  return order;
}

// The totals of kFloats vectors, a lane each: neighbours are added until none are left.
inline Floats totals(Floats* x) {
  for (int num = kFloats; num > 1; num /= 2)
    for (int i = 0; i < num / 2; ++i)
      x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], every_second(0)) +
             __builtin_shuffle(x[2 * i], x[2 * i + 1], every_second(1));
  return x[0];
}

// One thread's queries, and what they have added up so far, with weights relative to exp(top).
template <class T, class Width>
class Queries {
  using Scalar = typename Lane<T>::Scalar;
  using Lanes = typename Lane<T>::Vector;
  static constexpr int64_t kParts = Lane<T>::kParts;
  static constexpr int64_t kInputs = kFloats * kParts;  // of a vector

 public:
  Queries(int64_t group, Width width)
      : group_(group),
        width_(width),
        columns_(round_up(width, kFloats)),
        q_(group * num_vectors()),
        v_(kKeys * columns_),
        o_(group * columns_),
        weight_(kKeys + kParts),
        top_(group),
        total_(group) {}

  void begin(const T* q) {
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t i = 0; i < num_vectors(); ++i)
        q_[g * num_vectors() + i] = part(q + g * width_, i);
    std::fill(o_.begin(), o_.end(), 0.0f);
    std::fill(top_.begin(), top_.end(), -INFINITY);
    std::fill(total_.begin(), total_.end(), 0.0f);
  }

  // Add a block to the sums, and fetch the next one meanwhile.
  void attend(const Block<T>& block, const Block<T>& next, float scale) {
    int64_t num_lines = block.copy_values(width_, v_.data(), columns_);
    for (int64_t g = 0; g < group_; ++g) {
      int64_t begin = kKeys * g / group_, end = kKeys * (g + 1) / group_;
      for (int64_t l = begin; l < end; ++l) next.prefetch(l, width_);
      for (int64_t l = 0; l < block.num_keys; l += kFloats) multiply_keys(block, l, g, scale);
      float factor = weigh(block.num_keys, g);
      add_values(num_lines, &o_[g * columns_], factor);
    }
  }

  void write(T* o) const {
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t h = 0; h < width_; ++h)
        put(o[g * width_ + h], o_[g * columns_ + h] / total_[g]);
  }

 private:
  int64_t num_vectors() const { return (width_ + kInputs - 1) / kInputs; }

  // Vector i of a head.
  Lanes part(const T* x, int64_t i) const {
    if ((i + 1) * kInputs <= width_) return load<Lanes>(x + i * kInputs);
    Lanes lanes{};
    std::memcpy(&lanes, x + i * kInputs, (width_ - i * kInputs) * sizeof(T));
    return lanes;
  }

  // Scores of kFloats keys from l on.
  void multiply_keys(const Block<T>& block, int64_t l, int64_t g, float scale) {
    Floats sum[kFloats] = {};
    const Lanes* q = &q_[g * num_vectors()];
    for (int64_t i = 0; i < num_vectors(); ++i)
      for (int j = 0; j < kFloats; ++j)
        sum[j] = multiply_add(part(block.k[l + j], i), q[i], sum[j]);
    Floats score = totals(sum) * scale;
    std::memcpy(&score_[l], &score, sizeof(score));
  }

  // Turn scores into weights. Returns by what earlier sums have to be scaled.
  float weigh(int64_t num_keys, int64_t g) {
    float top = top_[g], total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t l = 0; l < num_keys; ++l) top = std::max(top, score_[l]);
    std::fill_n(&weight_[num_keys / kParts * kParts], kParts, T(0));
#pragma omp simd reduction(+ : total)
    for (int64_t l = 0; l < num_keys; ++l) {
      float x = exp_nonpositive(score_[l] - top);
      total += x;
      put(weight_[l], x);
    }
    float factor = exp_nonpositive(top_[g] - top);
    top_[g] = top;
    total_[g] = total_[g] * factor + total;
    return factor;
  }

  // o = o * factor + weight @ v, some vectors side by side.
  void add_values(int64_t num_lines, float* o, float factor) {
    int64_t h = 0;
    for (; h + 4 * kFloats <= columns_; h += 4 * kFloats) add_columns<4>(num_lines, h, o, factor);
    for (; h < columns_; h += kFloats) add_columns<1>(num_lines, h, o, factor);
  }

  template <int kVectors>
  void add_columns(int64_t num_lines, int64_t h, float* o, float factor) {
    Floats sum[kVectors];
    for (int i = 0; i < kVectors; ++i) sum[i] = load<Floats>(o + h + i * kFloats) * factor;
    for (int64_t l = 0; l < num_lines; ++l) {
      auto weight = load<Scalar>(&weight_[l * kParts]);
      for (int i = 0; i < kVectors; ++i)
        sum[i] = multiply_add(load<Lanes>(&v_[l * columns_ + h + i * kFloats]), weight, sum[i]);
    }
    std::memcpy(o + h, sum, sizeof(sum));
  }

  int64_t group_;
  Width width_;
  int64_t columns_;
  std::vector<Lanes> q_;
  std::vector<Scalar> v_;
  std::vector<float> o_;
  std::array<float, kKeys> score_;
  std::vector<T> weight_;
  std::vector<float> top_, total_;
};

}  // namespace

// One query of each request against its paged context, or against the last `window` tokens of it if
// that is not zero.
void attend_decode(TensorView q_TNH, TensorView k_SKH, TensorView v_SKH, TensorView page_table_RP,
                   int64_t page_size, TensorView token_B, TensorView row_B, TensorView position_B,
                   TensorView o_TNH, double scale, int64_t window) {
  Integers tokens(token_B), rows(row_B), positions(position_B);
  int64_t batch = token_B.size(0), num_kv_heads = k_SKH.size(1);
  int64_t group = q_TNH.size(1) / num_kv_heads;
  int64_t num_positions = batch;
  for (int64_t b = 0; b < batch; ++b) num_positions += positions[b];
  int64_t work = num_positions * q_TNH.size(1) * q_TNH.size(2);
  Pool pool{k_SKH, v_SKH, page_table_RP, page_size};
  auto attend = [&](auto zero, auto width) {
    using T = decltype(zero);
#pragma omp parallel if (work > 2 * kParallelWork)
    {
      Queries<T, decltype(width)> queries(group, width);
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < batch * num_kv_heads; ++task) {
        int64_t b = task / num_kv_heads, kv_head = task % num_kv_heads;
        int64_t head = kv_head * group * width, end = positions[b] + 1;
        int64_t begin = window ? std::max<int64_t>(0, end - window) : 0;
        queries.begin(row<T>(q_TNH, tokens[b]) + head);
        for_blocks<T>(pool, rows[b], kv_head, begin, end,
                      [&](const Block<T>& block, const Block<T>& next) {
                        queries.attend(block, next, float(scale));
                      });
        queries.write(row<T>(o_TNH, tokens[b]) + head);
      }
    }
  };
  for_dtype(q_TNH, [&](auto zero) {
    for_width(q_TNH.size(2), [&](auto width) { attend(zero, width); });
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_decode, attend_decode);
