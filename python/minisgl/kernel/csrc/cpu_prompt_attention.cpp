// Causal attention of slices of several tokens over a paged context, in blocks of keys that stay in
// a core's cache (Dao et al. 2022, arXiv:2205.14135).
//
// A task has some tokens of a slice, and of each the query heads that share a kv head: its rows. A
// row is a lane of vectors, so nothing is added up across lanes. Keys are read where they lie in
// their pages; values are copied, neighbours side by side. A matrix unit multiplies the same lanes,
// but with a copy of the keys, and with transposed values: a row has one number of every key.
//
// While a block is attended to, the next one is prefetched: pages are scattered in memory, so the
// processor's own prefetcher does not find them. Products in vectors prefetch a line at a time, as
// an AMD processor drops most of many at once.
//
// If there are few rows, the context is divided among tasks, and their sums are merged (Dao et al.
// 2023, "Flash-Decoding").
//
// A lane has 32 bits: a float, or a pair of bfloat16.
//
// Dimensions: B slices of a step, H head width, K kv heads, N query heads, P pages, Q positions of
// a page, R rows of the tables, T tokens of a step.

#include <omp.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu_matrix_unit.h"
#include "cpu_pages.h"

namespace {

constexpr int64_t kMaxRows = 192;  // rows of a task
constexpr int64_t kMinKeys = 256;  // keys of a task: fewer are not worth its sums
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kNoWindow = 1 << 30;  // beyond all positions
constexpr float kHidden = -1e30f;  // a score whose weight vanishes beside any other

// As many sums at a time as registers hold. Products of one vector have twice as many scalars: with
// fewer sums, a processor waits for its last products.
constexpr int kScalarsAtOnce = kFloats == 16 ? 8 : 4;
constexpr int kVectorsAtOnce = kFloats == 16 ? 3 : 2;
constexpr int kTilesAtOnce = 2;  // tiles of columns in a matrix unit

constexpr int num_scalars(int64_t num_vectors) {
  return num_vectors == 1 ? 2 * kScalarsAtOnce : kScalarsAtOnce;
}

// `width` vectors of rows that are computed together. Lines of a strip's matrices have as many
// vectors.
struct Strip {
  int64_t first, width;
};

// The cache lines of a block that are not prefetched yet: keys, then values.
template <class T>
class Lines {
 public:
  void begin(const Block<T>& block, int64_t width) {
    block_ = &block;
    width_ = width;
    row_ = block.k.data();
    num_rows_ = 2 * block.num_keys;
    column_ = 0;
  }

  void prefetch_one() {
    if (num_rows_ == 0) return;
    __builtin_prefetch(*row_ + column_);
    column_ += kCacheLine / int64_t(sizeof(T));
    if (column_ < width_) return;
    column_ = 0;
    ++row_;
    if (--num_rows_ == block_->num_keys) row_ = block_->v.data();
  }

 private:
  const Block<T>* block_ = nullptr;
  const T* const* row_ = nullptr;  // its keys, then its values
  int64_t width_ = 0, num_rows_ = 0, column_ = 0;
};

// c[i][r] += a(i, k) * b[k][r], summed over k, for num_scalars(kVectors) i and kVectors vectors of
// r.
template <int kVectors, class T, class Vector, class Scalar>
inline void multiply_tile(const Scalar& a, const Vector* b, int64_t depth, Floats* c,
                          Lines<T>& lines) {
  constexpr int kScalars = num_scalars(kVectors);
  // So many steps prefetch one line. Then the products of a strip prefetch a block.
  constexpr int64_t kStepsOfLine = kCacheLine / (kScalars * int64_t(sizeof(float)));
  Lines<T> left = lines;  // in registers
  Floats sum[kScalars][kVectors];
  for (int i = 0; i < kScalars; ++i)
    for (int r = 0; r < kVectors; ++r) sum[i][r] = c[i * kVectors + r];
  for (int64_t k = 0; k < depth; ++k) {
    if (k % kStepsOfLine == 0) left.prefetch_one();
    Vector lanes[kVectors];
    for (int r = 0; r < kVectors; ++r) lanes[r] = b[k * kVectors + r];
    for (int i = 0; i < kScalars; ++i) {
      auto scalar = a(i, k);
      for (int r = 0; r < kVectors; ++r) sum[i][r] = multiply_add(lanes[r], scalar, sum[i][r]);
    }
  }
  for (int i = 0; i < kScalars; ++i)
    for (int r = 0; r < kVectors; ++r) c[i * kVectors + r] = sum[i][r];
  lines = left;
}

// The same for lines of `width` vectors, at most kVectorsAtOnce.
template <class T, class Vector, class Scalar>
inline void multiply(const Scalar& a, const Vector* b, int64_t depth, Floats* c, int64_t width,
                     Lines<T>& lines) {
  if (width == 1) return multiply_tile<1>(a, b, depth, c, lines);
  if (width == 2) return multiply_tile<2>(a, b, depth, c, lines);
  if constexpr (kVectorsAtOnce > 2) multiply_tile<3>(a, b, depth, c, lines);
}

// The sums of rows so far, with weights relative to exp(top). For each strip, `o_` has a line for
// each dimension of the output.
class Sums {
 public:
  void begin(int64_t width, const std::vector<Strip>& strips) {
    strips_ = strips;
    num_lines_ = round_up(width, 2 * kScalarsAtOnce);
    int64_t num_vectors = strips.back().first + strips.back().width;
    o_.assign(num_lines_ * num_vectors, Floats{});
    top_.assign(num_vectors, Floats{} + kHidden);
    total_.assign(num_vectors, Floats{});
  }

  // Raise the tops of a strip's vector to `top` where that is higher, and scale its sums
  // accordingly. Returns the new tops.
  Floats raise(const Strip& strip, int64_t i, Floats top) {
    int64_t r = strip.first + i;
    top = top > top_[r] ? top : top_[r];
    if (std::memcmp(&top, &top_[r], sizeof(top)) == 0) return top;
    Floats factor = exp_nonpositive(top_[r] - top);
    top_[r] = top;
    total_[r] *= factor;
    for (int64_t h = 0; h < num_lines_; ++h) o(strip)[h * strip.width + i] *= factor;
    return top;
  }

  void add_total(int64_t r, Floats total) { total_[r] += total; }

  Floats* o(const Strip& strip) { return &o_[strip.first * num_lines_]; }
  const Floats* o(const Strip& strip) const { return &o_[strip.first * num_lines_]; }

  void merge(const Sums& other) {
    for (const Strip& strip : strips_)
      for (int64_t i = 0; i < strip.width; ++i) {
        int64_t r = strip.first + i;
        Floats factor = exp_nonpositive(other.top_[r] - raise(strip, i, other.top_[r]));
        total_[r] += other.total_[r] * factor;
        for (int64_t h = 0; h < num_lines_; ++h)
          o(strip)[h * strip.width + i] += other.o(strip)[h * strip.width + i] * factor;
      }
  }

  // Write the output. Row r is head r % group of token r / group.
  template <class T>
  void write(T* output, int64_t stride, int64_t num_rows, int64_t group, int64_t width) const {
    for (const Strip& strip : strips_)
      for (int64_t i = 0; i < strip.width; ++i) {
        int64_t first = (strip.first + i) * kFloats, end = std::min(first + kFloats, num_rows);
        Floats share = 1.0f / total_[strip.first + i];
        for (int64_t h = 0; h < width; h += kFloats) {
          int64_t num_columns = std::min<int64_t>(kFloats, width - h);
          Pairs square[kFloats] = {};
          for (int64_t j = 0; j < num_columns; ++j)
            square[j] = (Pairs)(o(strip)[(h + j) * strip.width + i] * share);
          transpose(square);
          for (int64_t r = first; r < end; ++r) {
            float numbers[kFloats];
            std::memcpy(numbers, &square[r - first], sizeof(numbers));
            T* y = output + r / group * stride + r % group * width + h;
            for (int64_t j = 0; j < num_columns; ++j) put(y[j], numbers[j]);
          }
        }
      }
  }

 private:
  std::vector<Strip> strips_;
  int64_t num_lines_ = 0;
  std::vector<Floats> o_, top_, total_;
};

// One thread's rows, and the scores and weights of the strip that it computes.
template <class T>
class Rows {
  using Scalar = typename Lane<T>::Scalar;
  using Lanes = typename Lane<T>::Vector;
  static constexpr int64_t kParts = Lane<T>::kParts;

 public:
  Rows(int64_t group, int64_t width, bool is_in_unit)
      : group_(group),
        width_(width),
        depth_(width / kParts),
        columns_(round_up(width, 2 * kScalarsAtOnce)),
        is_in_unit_(is_in_unit),
        k_(is_in_unit ? kKeys * width : 0),
        v_(kKeys * columns_),
        weight_(kKeys * kVectorsAtOnce),
        score_(kKeys * kVectorsAtOnce) {}

  // Row r is head r % group of token r / group. Tokens are `stride` numbers apart. The first one is
  // at `position`.
  void begin(const T* q, int64_t stride, int64_t num_tokens, int64_t position) {
    position_ = position;
    int64_t num_rows = num_tokens * group_, num_vectors = round_up(num_rows, kFloats) / kFloats;
    int64_t most = is_in_unit_ ? kTilesAtOnce : kVectorsAtOnce;
    strips_.clear();
    for (int64_t r = 0; r < num_vectors; r += most)
      strips_.push_back({r, std::min(most, num_vectors - r)});
    q_.assign(depth_ * num_vectors, Lanes{});
    last_.assign(num_vectors, Ints{} + static_cast<int32_t>(position + num_tokens - 1));
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t vector = r / kFloats, lane = r % kFloats;
      last_[vector][lane] = static_cast<int32_t>(position + r / group_);
      const T* query = q + r / group_ * stride + r % group_ * width_;
      const Strip& strip = strips_[vector / most];
      Lanes* line = &q_[strip.first * depth_ + vector - strip.first];
      for (int64_t h = 0; h < depth_; ++h)
        line[h * strip.width][lane] = load<Scalar>(query + h * kParts);
    }
  }

  const std::vector<Strip>& strips() const { return strips_; }

  // Add a block to the sums, and prefetch the next one meanwhile.
  void attend(const Block<T>& block, const Block<T>& next, int64_t window, float scale,
              Sums& sums) {
    read(block);
    if (!is_in_unit_) lines_.begin(next, width_);
    for (const Strip& strip : strips_) {
      score(block, strip, next);
      hide(block, strip, window);
      for (int64_t i = 0; i < strip.width; ++i) weigh(block, strip, i, scale, sums);
      add_values(block, strip, sums);
    }
  }

 private:
  // Copy what all strips read. For a matrix unit, a row is a key, or one dimension of the values.
  void read(const Block<T>& block) {
    if (is_in_unit_) {
      int64_t num_keys = round_up(block.num_keys, kTileInputs);
      block.copy_keys(num_keys, width_, k_.data());
      block.turn_values(num_keys, width_, v_.data());
    } else {
      block.copy_values(width_, v_.data(), columns_);
    }
  }

  // Compute the scores of a strip. For a matrix unit, it prefetches a share of the next block.
  void score(const Block<T>& block, const Strip& strip, const Block<T>& next) {
    const Lanes* q = &q_[strip.first * depth_];
    if (is_in_unit_) {
      int64_t num_vectors = last_.size(), end = strip.first + strip.width;
      for (int64_t l = kKeys * strip.first / num_vectors; l < kKeys * end / num_vectors; ++l)
        next.prefetch(l, width_);
      multiply_in_unit<false>(k_.data(), width_, round_up(block.num_keys, kTileInputs), width_, q,
                              score_.data(), strip.width);
      return;
    }
    std::fill_n(score_.begin(), kKeys * strip.width, Floats{});
    for (int64_t l = 0; l < block.num_keys; l += num_scalars(strip.width)) {
      const T* const* k = &block.k[l];
      multiply([=](int i, int64_t h) { return load<Scalar>(k[i] + kParts * h); }, q, depth_,
               &score_[l * strip.width], strip.width, lines_);
    }
  }

  // Mask the keys that a row does not see. One that repeats the last key counts as a later
  // position, which no row sees.
  void hide(const Block<T>& block, const Strip& strip, int64_t window) {
    int64_t num_keys = round_up(block.num_keys, kParts), last = last_.back()[kFloats - 1];
    if (block.key + num_keys <= position_ + 1 && block.key + window > last) return;
    for (int64_t l = 0; l < num_keys; ++l) {
      Ints key = Ints{} + static_cast<int32_t>(block.key + l);
      for (int64_t i = 0; i < strip.width; ++i) {
        Floats& score = score_[l * strip.width + i];
        Ints last_seen = last_[strip.first + i];
        Ints is_seen = (key <= last_seen) & (key + static_cast<int32_t>(window) > last_seen);
        score = is_seen ? score : Floats{} + kHidden;
      }
    }
  }

  // Turn the scores of vector i of a strip into weights.
  void weigh(const Block<T>& block, const Strip& strip, int64_t i, float scale, Sums& sums) {
    const Floats* score = &score_[i];
    Lanes* weight = &weight_[i];
    int64_t num_keys = round_up(block.num_keys, kParts);
    Floats top = score[0], total{};
    for (int64_t l = 1; l < num_keys; ++l) {
      Floats x = score[l * strip.width];
      top = x > top ? x : top;
    }
    top = sums.raise(strip, i, top * scale);
    for (int64_t l = 0; l < num_keys; l += kParts) {
      Floats x[kParts];
      for (int64_t j = 0; j < kParts; ++j) {
        x[j] = exp_nonpositive(score[(l + j) * strip.width] * scale - top);
        total += x[j];
      }
      weight[l / kParts * strip.width] = pack(x);
    }
    sums.add_total(strip.first + i, total);
  }

  static Floats pack(const Floats (&x)[1]) { return x[0]; }
  // To the nearest bfloat16s. A tie goes up, which takes one addition: weights are not negative.
  static Pairs pack(const Floats (&x)[2]) {
    Pairs low = (Pairs)x[0] + 0x8000, high = (Pairs)x[1] + 0x8000;
    return (low >> 16) | (high & 0xffff0000);
  }

  // Add the weighted values. For a matrix unit, keys after the last one have weights of zero.
  void add_values(const Block<T>& block, const Strip& strip, Sums& sums) {
    int64_t num_lines = round_up(block.num_keys, kParts) / kParts;
    if (is_in_unit_) {
      int64_t num_keys = round_up(block.num_keys, kTileInputs);
      std::fill(&weight_[num_lines * strip.width], &weight_[num_keys / kParts * strip.width],
                Lanes{});
      multiply_in_unit<true>(v_.data(), kKeys, width_, num_keys, weight_.data(), sums.o(strip),
                             strip.width);
      return;
    }
    for (int64_t h = 0; h < width_; h += num_scalars(strip.width)) {
      const Scalar* v = &v_[h];
      multiply([=, this](int i, int64_t l) { return v[l * columns_ + i]; }, weight_.data(),
               num_lines, sums.o(strip) + h * strip.width, strip.width, lines_);
    }
  }

  int64_t group_, width_, depth_, columns_, position_ = 0;
  bool is_in_unit_;
  std::vector<T> k_;       // keys of a block, for a matrix unit
  std::vector<Scalar> v_;  // values of a block: a line for kParts keys, or for a dimension (unit)
  std::vector<Strip> strips_;
  std::vector<Lanes> q_, weight_;
  std::vector<Floats> score_;
  std::vector<Ints> last_;  // the last position that each row sees
  Lines<T> lines_;             // of the next block
};

// Some tokens of a slice, and some of the keys that they see.
struct Part {
  int64_t slice, first, length, begin, end;
  int64_t index, num_parts;  // among the parts of these tokens
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

// The queries [query, query + length) of each slice against the paged context of its row. They are
// at positions [start, start + length). Each sees the positions up to its own, or the last `window`
// of these unless `window` is 0. H is even, and the scale positive.
void attend_prompts(TensorView q_TNH, TensorView k_PQKH, TensorView v_PQKH,
                    TensorView page_table_RP, TensorView query_B, TensorView row_B,
                    TensorView start_B, TensorView length_B, TensorView o_TNH, double scale,
                    int64_t window) {
  Integers queries(query_B), rows(row_B), starts(start_B), lengths(length_B);
  int64_t num_kv_heads = k_PQKH.size(2), width = q_TNH.size(2);
  int64_t group = q_TNH.size(1) / num_kv_heads;
  window = window ? std::min(window, kNoWindow) : kNoWindow;
  std::vector<Part> parts =
      divide(starts, lengths, query_B.size(0), num_kv_heads, group, window);
  int64_t num_parts = static_cast<int64_t>(parts.size());
  Pool pool{Pages(k_PQKH), Pages(v_PQKH), page_table_RP};
  int64_t num_tasks = num_parts * num_kv_heads;
  std::vector<Sums> sums(num_tasks);  // used for tokens that have several parts

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
      bool is_in_unit = kIsForUnit<T> && width % kTileInputs == 0 && has_matrix_unit();
      MatrixUnit unit(is_in_unit);
      Rows<T> rows_of_task(group, width, is_in_unit);
      Sums own;
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_tasks; ++i) {
        const Part& part = parts[num_parts - 1 - i / num_kv_heads];  // longest first
        int64_t kv_head = i % num_kv_heads;
        Sums& sum = part.num_parts == 1 ? own : sums[i];
        rows_of_task.begin(heads(q_TNH, part, kv_head), q_TNH.stride(0), part.length,
                           starts[part.slice] + part.first);
        sum.begin(width, rows_of_task.strips());
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
