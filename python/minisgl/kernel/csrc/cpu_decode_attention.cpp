// Attention of single queries over a paged context, in blocks of keys that stay in a core's cache.
//
// The queries of a token that share a kv head go together. They are too few to be the lanes of a
// vector, as the rows of a prompt are in cpu_prompt_attention.cpp, so the numbers of a head are the
// lanes. Where there is a matrix unit, cpu_unit_decode.h computes a block instead.
//
// A context is cut into ranges, which threads divide. A thread takes its next range while it
// computes the last block of the current one, so that it knows which block comes next. The sums of
// the ranges of a context are merged (Dao et al. 2023, "Flash-Decoding"). How a context is cut
// depends on its length alone, so its output does not depend on the batch.
//
// Dimensions: B requests of a step, H head width, K kv heads, N query heads, P pages, Q positions
// of a page, R rows of the tables, T tokens of a step.

#include <omp.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_pages.h"
#include "cpu_query_sums.h"
#include "cpu_totals.h"
#include "cpu_unit_decode.h"
#include "divided_loop.h"

namespace {

// A range of the keys and values that a kv head of a request has.
struct Range {
  int64_t b, kv_head, begin, end;
  int64_t index, num_ranges;  // among the ranges of this head
};

constexpr int64_t kRangeBlocks = 4;  // the most blocks of a range

inline int64_t num_blocks(int64_t num_keys) { return (num_keys + kKeys - 1) / kKeys; }

// The ranges of all heads, in the order of their requests.
std::vector<Range> ranges_of(const Integers& positions, int64_t batch, int64_t num_kv_heads,
                             int64_t window) {
  std::vector<Range> ranges;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t last = positions[b] + 1, first = window ? std::max<int64_t>(0, last - window) : 0;
    int64_t blocks = num_blocks(last - first), num = (blocks + kRangeBlocks - 1) / kRangeBlocks;
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head)
      for (int64_t i = 0; i < num; ++i) {
        int64_t begin = first + blocks * i / num * kKeys;
        int64_t end = std::min(first + blocks * (i + 1) / num * kKeys, last);
        ranges.push_back({b, kv_head, begin, end, i, num});
      }
  }
  return ranges;
}

// One thread's queries, and their sums so far.
template <class T, class Width>
class Queries {
  using Scalar = typename Lane<T>::Scalar;
  using Lanes = typename Lane<T>::Vector;
  static constexpr int64_t kParts = Lane<T>::kParts;
  static constexpr int64_t kInputs = kFloats * kParts;  // numbers in a vector

 public:
  Queries(int64_t group, Width width)
      : group_(group),
        width_(width),
        columns_(round_up(width, kFloats)),
        q_(group * num_vectors()),
        v_(kKeys * columns_),
        weight_(kKeys + kParts),
        sums_(group, columns_, group) {}

  void begin(const T* q) {
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t i = 0; i < num_vectors(); ++i)
        q_[g * num_vectors() + i] = part(q + g * width_, i);
    sums_.clear();
  }

  // Add a block to the sums, and prefetch the next one meanwhile, a cache line at a time: a load
  // after many prefetches waits for them.
  void attend(const Block<T>& block, const Block<T>& next, float scale) {
    int64_t num_lines = block.copy_values(width_, v_.data(), columns_);
    for (int64_t g = 0; g < group_; ++g) {
      for (int64_t l = 0; l < block.num_keys; l += kFloats)
        multiply_keys(block, next, l, g, scale);
      float factor = weigh(block.num_keys, g);
      add_values(num_lines, next, g, factor);
    }
  }

  void write(T* o) const {
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t h = 0; h < width_; ++h)
        put(o[g * width_ + h], sums_.o(g)[h] / sums_.total(g));
  }

  QuerySums& sums() { return sums_; }

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
  void multiply_keys(const Block<T>& block, const Block<T>& next, int64_t l, int64_t g,
                     float scale) {
    Floats sum[kFloats] = {};
    const Lanes* q = &q_[g * num_vectors()];
    for (int64_t i = 0; i < num_vectors(); ++i) {
      bool fetches = i % group_ == g;
      for (int j = 0; j < kFloats; ++j) {
        if (fetches) __builtin_prefetch(next.k[l + j] + i * kInputs);
        sum[j] = multiply_add(part(block.k[l + j], i), q[i], sum[j]);
      }
    }
    Floats score = totals<kFloats>(sum) * scale;
    std::memcpy(&score_[l], &score, sizeof(score));
  }

  // Turn scores into weights. Returns the factor by which earlier sums have to be scaled.
  float weigh(int64_t num_keys, int64_t g) {
    float top = sums_.top(g), total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t l = 0; l < num_keys; ++l) top = std::max(top, score_[l]);
    std::fill_n(&weight_[num_keys / kParts * kParts], kParts, T(0));
#pragma omp simd reduction(+ : total)
    for (int64_t l = 0; l < num_keys; ++l) {
      float x = exp_nonpositive(score_[l] - top);
      total += x;
      put(weight_[l], x);
    }
    return sums_.add_total(g, top, total);
  }

  // o = o * factor + weight @ v, four vectors of columns at a time while there are four.
  void add_values(int64_t num_lines, const Block<T>& next, int64_t g, float factor) {
    int64_t h = 0;
    for (; h + 4 * kFloats <= columns_; h += 4 * kFloats)
      add_columns<4>(num_lines, next, g, h, factor);
    for (; h < columns_; h += kFloats) add_columns<1>(num_lines, next, g, h, factor);
  }

  template <int kVectors>
  void add_columns(int64_t num_lines, const Block<T>& next, int64_t g, int64_t h, float factor) {
    Floats sum[kVectors];
    float* o = sums_.o(g) + h;
    for (int i = 0; i < kVectors; ++i) sum[i] = load<Floats>(o + i * kFloats) * factor;
    for (int64_t l = 0; l < num_lines; ++l) {
      auto weight = load<Scalar>(&weight_[l * kParts]);
      for (int i = 0; i < kVectors; ++i) {
        int64_t column = h + i * kFloats;
        if (column % kInputs == 0 && column / kInputs % group_ == g)
          for (int p = 0; p < kParts; ++p) __builtin_prefetch(next.v[l * kParts + p] + column);
        sum[i] = multiply_add(load<Lanes>(&v_[l * columns_ + column]), weight, sum[i]);
      }
    }
    std::memcpy(o, sum, sizeof(sum));
  }

  int64_t group_;
  Width width_;
  int64_t columns_;
  std::vector<Lanes> q_;
  std::vector<Scalar> v_;
  std::array<float, kKeys> score_;
  std::vector<T> weight_;
  QuerySums sums_;
};

// For each block of the ranges that the calling thread takes, call f with the range, the block, and
// the block after it.
template <class T, class F>
void for_blocks_of(const Pool& pool, const Integers& rows, const std::vector<Range>& ranges,
                   DividedLoop& loop, F f) {
  Block<T> blocks[2] = {};
  auto take = [&] {
    int64_t i = loop.next();
    return i < 0 ? nullptr : &ranges[i];
  };
  auto find = [&](const Range* place, int64_t key, Block<T>& block) {
    if (place)
      pool.find(rows[place->b], place->kv_head, key, place->end, block);
    else
      block.num_keys = 0;
  };
  const Range* range = take();
  if (range) find(range, range->begin, blocks[0]);
  for (int i = 0; range; i = 1 - i) {
    const Range* next = range;
    int64_t key = blocks[i].key + kKeys;
    if (key >= range->end) {
      next = take();
      key = next ? next->begin : 0;
    }
    find(next, key, blocks[1 - i]);
    f(*range, blocks[i], blocks[1 - i]);
    range = next;
  }
}

}  // namespace

// One query of each request against its paged context, or against its last `window` tokens unless
// `window` is 0. A position of -1 stands for a missing request; nothing is written for it.
void attend_decode(TensorView q_TNH, TensorView k_PQKH, TensorView v_PQKH, TensorView page_table_RP,
                   TensorView query_B, TensorView row_B, TensorView position_B, TensorView o_TNH,
                   double scale, int64_t window) {
  Integers queries(query_B), rows(row_B), positions(position_B);
  int64_t batch = query_B.size(0), num_kv_heads = k_PQKH.size(2);
  if (batch == 0) return;
  int64_t group = q_TNH.size(1) / num_kv_heads;
  std::vector<Range> ranges = ranges_of(positions, batch, num_kv_heads, window);
  if (ranges.empty()) return;
  int64_t num_ranges = ranges.size(), width = q_TNH.size(2);
  int64_t work = num_ranges * kRangeBlocks * kKeys * group * width;  // at most
  DividedLoop loop(num_ranges, 0);
  Pool pool{Pages(k_PQKH), Pages(v_PQKH), page_table_RP};
  auto is_part = [](const Range& range) { return range.num_ranges > 1; };
  bool has_several = std::any_of(ranges.begin(), ranges.end(), is_part);
  std::unique_ptr<float[]> sums;  // one for each range, if a head has several
  int64_t num_sums = QuerySums::num_floats(group, round_up(width, kFloats));
  if (has_several) sums = std::make_unique_for_overwrite<float[]>(num_ranges * num_sums);
  auto attend = [&](auto zero, auto width) {
    using T = decltype(zero);
    auto heads = [&](const TensorView& x, const Range& range) {
      return row<T>(x, queries[range.b]) + range.kv_head * group * width;
    };
    auto attend_own = [&](auto queries) {
      for_blocks_of<T>(pool, rows, ranges, loop,
                       [&](const Range& range, const Block<T>& block, const Block<T>& next) {
                         if (block.key == range.begin) queries.begin(heads(q_TNH, range));
                         queries.attend(block, next, float(scale));
                         if (block.key + kKeys < range.end) return;
                         if (range.num_ranges == 1)
                           queries.write(heads(o_TNH, range));
                         else
                           queries.sums().save(&sums[(&range - &ranges[0]) * num_sums]);
                       });
      if (!has_several) return;
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t i = 0; i < num_ranges; ++i) {
        const Range& range = ranges[i];
        if (range.index || range.num_ranges == 1) continue;
        queries.sums().merge(&sums[i * num_sums], range.num_ranges);
        queries.write(heads(o_TNH, range));
      }
    };
    bool is_in_unit = kIsForUnit<T> && width % kTileInputs == 0 && has_matrix_unit();
#pragma omp parallel if (work > 2 * kParallelWork)
    {
      using Width = decltype(width);
      if constexpr (kIsForUnit<T>)
        if (is_in_unit) {
          MatrixUnit unit(true, UnitQueries<Width>::num_rows(group));
          attend_own(UnitQueries<Width>(group, width, k_PQKH.stride(1), v_PQKH.stride(1)));
        }
      if (!is_in_unit) attend_own(Queries<T, Width>(group, width));
    }
  };
  for_dtype(q_TNH, [&](auto zero) {
    for_width(width, [&](auto constant_width) { attend(zero, constant_width); });
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_decode, attend_decode);
