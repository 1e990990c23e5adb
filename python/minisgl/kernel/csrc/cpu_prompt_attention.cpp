// Causal attention of slices of several tokens over a paged context, in blocks of keys that stay in
// a core's cache (Dao et al. 2022, arXiv:2205.14135).
//
// A task has some tokens of a slice, and of each the query heads that share a kv head: its rows. A
// row is a lane of vectors, so nothing is added up across lanes. Keys are read where they lie in
// their pages; values are copied, neighbours side by side. While a block is attended to, the next
// one is on its way from memory: pages lie anywhere, and no processor guesses where.
//
// If there are few rows, the context is divided among tasks, and their sums are merged (Dao et al.
// 2023, "Flash-Decoding").
//
// A lane has 32 bits: a float, or a pair of bfloat16.
//
// Dimensions: B slices of a step, H head width, K kv heads, N query heads, P pages, R rows of the
// tables, S kv slots, T tokens of a step.

#include <omp.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu_pages.h"

namespace {

constexpr int64_t kMaxRows = 96;   // of a task
constexpr int64_t kMinKeys = 256;  // of a task: fewer are not worth its sums
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kNoWindow = 1 << 30;  // beyond all positions
constexpr float kHidden = -1e30f;  // a score whose weight vanishes beside any other

// As many sums side by side as registers hold.
constexpr int kScalarsAtOnce = kFloats == 16 ? 8 : 4;
constexpr int kVectorsAtOnce = kFloats == 16 ? 3 : 2;

// c[i][r] += a(i, k) * b[k][r], summed over k, for kScalarsAtOnce i and kVectors vectors of r.
template <int kVectors, class Lanes, class Scalar>
inline void multiply_tile(const Scalar& a, const Lanes* b, int64_t depth, Floats* c,
                          int64_t stride) {
  Floats sum[kScalarsAtOnce][kVectors];
  for (int i = 0; i < kScalarsAtOnce; ++i)
    for (int r = 0; r < kVectors; ++r) sum[i][r] = c[i * stride + r];
  for (int64_t k = 0; k < depth; ++k) {
    Lanes lanes[kVectors];
    for (int r = 0; r < kVectors; ++r) lanes[r] = b[k * stride + r];
    for (int i = 0; i < kScalarsAtOnce; ++i) {
      auto scalar = a(i, k);
      for (int r = 0; r < kVectors; ++r) sum[i][r] = multiply_add(lanes[r], scalar, sum[i][r]);
    }
  }
  for (int i = 0; i < kScalarsAtOnce; ++i)
    for (int r = 0; r < kVectors; ++r) c[i * stride + r] = sum[i][r];
}

// The same for `stride` vectors of r, which is how far rows of b and c lie apart.
template <class Lanes, class Scalar>
inline void multiply(const Scalar& a, const Lanes* b, int64_t depth, Floats* c, int64_t stride) {
  int64_t r = 0;
  for (; r + kVectorsAtOnce <= stride; r += kVectorsAtOnce)
    multiply_tile<kVectorsAtOnce>(a, b + r, depth, c + r, stride);
  if constexpr (kVectorsAtOnce > 2)
    if (r + 2 <= stride) {
      multiply_tile<2>(a, b + r, depth, c + r, stride);
      r += 2;
    }
  if (r < stride) multiply_tile<1>(a, b + r, depth, c + r, stride);
}

// What rows have added up so far, with weights relative to exp(top).
class Sums {
 public:
  void begin(int64_t width, int64_t num_vectors) {
    num_vectors_ = num_vectors;
    o_.assign(round_up(width, kScalarsAtOnce) * num_vectors, Floats{});
    top_.assign(num_vectors, Floats{} + kHidden);
    total_.assign(num_vectors, Floats{});
  }

  // Scale the sums of a vector of rows to a top that is not lower; returns it.
  Floats raise(int64_t r, Floats top) {
    top = top > top_[r] ? top : top_[r];
    if (std::memcmp(&top, &top_[r], sizeof(top)) == 0) return top;
    Floats factor = exp_nonpositive(top_[r] - top);
    top_[r] = top;
    total_[r] *= factor;
    for (size_t i = r; i < o_.size(); i += num_vectors_) o_[i] *= factor;
    return top;
  }

  void add_total(int64_t r, Floats total) { total_[r] += total; }

  Floats* o(int64_t h) { return &o_[h * num_vectors_]; }

  void merge(const Sums& other) {
    for (int64_t r = 0; r < num_vectors_; ++r) {
      Floats factor = exp_nonpositive(other.top_[r] - raise(r, other.top_[r]));
      total_[r] += other.total_[r] * factor;
      for (size_t i = r; i < o_.size(); i += num_vectors_) o_[i] += other.o_[i] * factor;
    }
  }

  // Write the output of row r, which is head r % group of the token r / group.
  template <class T>
  void write(T* o, int64_t stride, int64_t num_rows, int64_t group, int64_t width) const {
    for (int64_t r = 0; r < num_rows; ++r) {
      T* output = o + r / group * stride + r % group * width;
      int64_t vector = r / kFloats, lane = r % kFloats;
      float share = 1.0f / total_[vector][lane];
      for (int64_t h = 0; h < width; ++h)
        put(output[h], o_[h * num_vectors_ + vector][lane] * share);
    }
  }

 private:
  int64_t num_vectors_ = 0;
  std::vector<Floats> o_, top_, total_;
};

// One thread's rows, and what it computes of them before it is added up.
template <class T>
class Rows {
  using Scalar = typename Lane<T>::Scalar;
  using Lanes = typename Lane<T>::Vector;
  static constexpr int64_t kParts = Lane<T>::kParts;

 public:
  Rows(int64_t group, int64_t width) : group_(group), width_(width) {}

  // Row r is head r % group of the token r / group, which lies `stride` behind the one before. The
  // first one stands at `position`.
  void begin(const T* q, int64_t stride, int64_t num_tokens, int64_t position) {
    position_ = position;
    num_rows_ = num_tokens * group_;
    num_vectors_ = round_up(num_rows_, kFloats) / kFloats;
    depth_ = width_ / kParts;
    columns_ = round_up(width_, kScalarsAtOnce);
    q_.assign(depth_ * num_vectors_, Lanes{});
    score_.resize(kKeys * num_vectors_);
    weight_.resize(kKeys * num_vectors_);
    v_.assign(kKeys * columns_, Scalar{});
    last_.assign(num_vectors_, Ints{} + static_cast<int32_t>(position + num_tokens - 1));
    for (int64_t r = 0; r < num_rows_; ++r) {
      last_[r / kFloats][r % kFloats] = static_cast<int32_t>(position + r / group_);
      const T* query = q + r / group_ * stride + r % group_ * width_;
      for (int64_t h = 0; h < depth_; ++h)
        q_[h * num_vectors_ + r / kFloats][r % kFloats] = load<Scalar>(query + h * kParts);
    }
  }

  int64_t num_vectors() const { return num_vectors_; }

  // Add a block to the sums, and fetch the next one meanwhile.
  void attend(const Block<T>& block, const Block<T>& next, int64_t window, float scale,
              Sums& sums) {
    std::fill_n(score_.begin(), kKeys * num_vectors_, Floats{});
    for (int64_t l = 0; l < block.num_keys; l += kScalarsAtOnce) {
      for (int64_t i = l; i < l + kScalarsAtOnce; ++i) next.prefetch(i, width_);
      const T* const* k = &block.k[l];
      multiply([=](int i, int64_t h) { return load<Scalar>(k[i] + kParts * h); }, q_.data(), depth_,
               &score_[l * num_vectors_], num_vectors_);
    }
    hide(block, window);
    for (int64_t r = 0; r < num_vectors_; ++r) add_weights(block, r, scale, sums);
    int64_t num_lines = block.copy_values(width_, v_.data(), columns_);
    for (int64_t h = 0; h < width_; h += kScalarsAtOnce) {
      const Scalar* v = &v_[h];
      multiply([=, this](int i, int64_t l) { return v[l * columns_ + i]; }, weight_.data(),
               num_lines, sums.o(h), num_vectors_);
    }
  }

 private:
  // Hide the keys that a row does not see. One that repeats the last key is behind all rows.
  void hide(const Block<T>& block, int64_t window) {
    int64_t num_keys = round_up(block.num_keys, kParts), last = last_.back()[kFloats - 1];
    if (block.key + num_keys <= position_ + 1 && block.key + window > last) return;
    for (int64_t l = 0; l < num_keys; ++l) {
      Ints key = Ints{} + static_cast<int32_t>(block.key + l);
      for (int64_t r = 0; r < num_vectors_; ++r) {
        Floats& score = score_[l * num_vectors_ + r];
        Ints is_seen = (key <= last_[r]) & (key + static_cast<int32_t>(window) > last_[r]);
        score = is_seen ? score : Floats{} + kHidden;
      }
    }
  }

  // Turn a vector of rows' scores into weights.
  void add_weights(const Block<T>& block, int64_t r, float scale, Sums& sums) {
    Floats* score = &score_[r];
    int64_t num_keys = round_up(block.num_keys, kParts);
    Floats top = score[0], total{};
    for (int64_t l = 1; l < num_keys; ++l) {
      Floats x = score[l * num_vectors_];
      top = x > top ? x : top;
    }
    top = sums.raise(r, top * scale);
    for (int64_t l = 0; l < num_keys; l += kParts) {
      Floats x[kParts];
      for (int64_t i = 0; i < kParts; ++i) {
        x[i] = exp_nonpositive(score[(l + i) * num_vectors_] * scale - top);
        total += x[i];
      }
      weight_[l / kParts * num_vectors_ + r] = pack(x);
    }
    sums.add_total(r, total);
  }

  static Floats pack(const Floats (&x)[1]) { return x[0]; }
  static Pairs pack(const Floats (&x)[2]) {
    Pairs low = (Pairs)x[0] + 0x8000, high = (Pairs)x[1] + 0x8000;
    return (low >> 16) | (high & 0xffff0000);
  }

  int64_t group_, width_, depth_ = 0, columns_ = 0;
  int64_t position_ = 0, num_rows_ = 0, num_vectors_ = 0;
  std::vector<Lanes> q_, weight_;
  std::vector<Floats> score_;
  std::vector<Scalar> v_;
  std::vector<Ints> last_;  // position that a row sees
};

// Some tokens of a slice, and some of the keys that they see.
struct Part {
  int64_t slice, first, length, begin, end;
  int64_t index, num_parts;  // among those of these tokens
};

// Divide slices into parts: tokens first, then keys, until all threads have work.
std::vector<Part> divide(const Integers& starts, const Integers& lengths, int64_t num_slices,
                         int64_t num_kv_heads, int64_t group, int64_t window) {
  int64_t num_tokens = std::max<int64_t>(1, kMaxRows / group), num_keys = 0;
  std::vector<Part> blocks, parts;
  for (int64_t b = 0; b < num_slices; ++b)
    for (int64_t first = 0; first < lengths[b]; first += num_tokens) {
      int64_t length = std::min(num_tokens, lengths[b] - first), position = starts[b] + first;
      int64_t begin = std::max<int64_t>(0, position + 1 - window);
      blocks.push_back({b, first, length, begin, position + length, 0, 1});
      num_keys += position + length - begin;
    }
  int64_t share = num_keys * num_kv_heads / (kTasksPerThread * omp_get_max_threads());
  share = round_up(std::max(share, kMinKeys), kKeys);
  for (Part part : blocks) {
    int64_t end = part.end;
    part.num_parts = (end - part.begin + share - 1) / share;
    for (; part.index < part.num_parts; ++part.index, part.begin = part.end) {
      part.end = std::min(part.begin + share, end);
      parts.push_back(part);
    }
  }
  return parts;
}

}  // namespace

// The queries [query, query + length) of each slice against the paged context of its row. They
// stand at positions [start, start + length), and see those up to their own, or the last `window`
// of them if that is not zero. H is even, and the scale positive.
void attend_prompts(TensorView q_TNH, TensorView k_SKH, TensorView v_SKH, TensorView page_table_RP,
                    int64_t page_size, TensorView query_B, TensorView row_B, TensorView start_B,
                    TensorView length_B, TensorView o_TNH, double scale, int64_t window) {
  Integers queries(query_B), rows(row_B), starts(start_B), lengths(length_B);
  int64_t num_kv_heads = k_SKH.size(1), width = q_TNH.size(2);
  int64_t group = q_TNH.size(1) / num_kv_heads;
  window = window ? std::min(window, kNoWindow) : kNoWindow;
  std::vector<Part> parts =
      divide(starts, lengths, query_B.size(0), num_kv_heads, group, window);
  int64_t num_parts = static_cast<int64_t>(parts.size());
  Pool pool{k_SKH, v_SKH, page_table_RP, page_size};
  int64_t num_tasks = num_parts * num_kv_heads;
  std::vector<Sums> sums(num_tasks);  // of tokens that have several parts

  for_dtype(q_TNH, [&](auto zero) {
    using T = decltype(zero);
    auto heads = [&](const TensorView& x, const Part& part, int64_t kv_head) {
      return row<T>(x, queries[part.slice] + part.first) + kv_head * group * width;
    };
    auto write = [&](const Sums& sum, const Part& part, int64_t kv_head) {
      sum.write(heads(o_TNH, part, kv_head), o_TNH.stride(0), part.length * group, group, width);
    };
#pragma omp parallel
    {
      Rows<T> rows_of_task(group, width);
      Sums own;
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_tasks; ++i) {
        const Part& part = parts[num_parts - 1 - i / num_kv_heads];  // longest first
        int64_t kv_head = i % num_kv_heads;
        Sums& sum = part.num_parts == 1 ? own : sums[i];
        rows_of_task.begin(heads(q_TNH, part, kv_head), q_TNH.stride(0), part.length,
                           starts[part.slice] + part.first);
        sum.begin(width, rows_of_task.num_vectors());
        for_blocks<T>(pool, rows[part.slice], kv_head, part.begin, part.end,
                      [&](const Block<T>& block, const Block<T>& next) {
                        rows_of_task.attend(block, next, window, float(scale), sum);
                      });
        if (part.num_parts == 1) write(sum, part, kv_head);
      }
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_tasks; ++i) {
        const Part& part = parts[num_parts - 1 - i / num_kv_heads];
        if (part.num_parts == 1 || part.index) continue;
        for (int64_t p = 1; p < part.num_parts; ++p) sums[i].merge(sums[i - p * num_kv_heads]);
        write(sums[i], part, i % num_kv_heads);
      }
    }
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_prompts, attend_prompts);
