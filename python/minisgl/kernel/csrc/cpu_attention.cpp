// Causal attention of slices of several tokens over a paged context, in tiles that stay in a core's
// cache (Dao et al. 2022, arXiv:2205.14135).
//
// A task has some tokens of a slice, and of each the query heads that share a kv head: its rows. It
// copies a block of keys and values out of their pages into tiles, attends with all rows, and goes
// on to the next block. So keys and values are read once for many rows, and never gathered.
//
// A tile's lanes have 32 bits: a float, or a pair of bfloat16 where the processor multiplies those.
//
// Dimensions: B slices of a step, H head width, K kv heads, N query heads, P pages, R rows of the
// tables, S kv slots, T tokens of a step.

#include <omp.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu.h"

namespace {

constexpr int64_t kKeys = 64;          // of a block
constexpr int kColumns = 2 * kFloats;  // that are summed side by side
constexpr int kRowsAtOnce = 6;         // with these columns, as many sums as registers hold
constexpr int64_t kMaxRows = 96;       // of a task
constexpr int64_t kMinRows = 24;       // fewer are not worth the copies of keys and values
constexpr int64_t kTasksPerThread = 3;

// What a tile has of tensors of T, and how many of them a lane has.
template <class T>
struct Tile {
  using Part = float;
  using Lanes = Floats;
  static constexpr int64_t kParts = 1;
};
#ifdef __AVX512BF16__
template <>
struct Tile<bf16> {
  using Part = bf16;
  using Lanes = Pairs;
  static constexpr int64_t kParts = 2;
};
#endif

template <class V>
V load(const void* x) {
  V value;
  std::memcpy(&value, x, sizeof(value));
  return value;
}

inline Floats multiply_add(Floats b, float a, Floats sum) { return sum + a * b; }
inline Floats multiply_add(Pairs b, uint32_t a, Floats sum) {
  return multiply_add(b, Pairs{} + a, sum);
}

// c += a @ b for kRows rows and kColumns columns. Strides count floats, or lanes of 32 bits.
template <class Lanes, int kRows>
void multiply_rows(const char* a, int64_t a_stride, const char* b, int64_t b_stride, int64_t depth,
                   float* c, int64_t c_stride) {
  using Lane = std::remove_cvref_t<decltype(Lanes{}[0])>;
  Floats sum[kRows][2];
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < 2; ++i) sum[r][i] = load<Floats>(c + r * c_stride + i * kFloats);
  for (int64_t k = 0; k < depth; ++k) {
    Lanes columns[2];
    for (int i = 0; i < 2; ++i) columns[i] = load<Lanes>(b + 4 * (k * b_stride + i * kFloats));
    for (int r = 0; r < kRows; ++r) {
      Lane lane = load<Lane>(a + 4 * (r * a_stride + k));
      for (int i = 0; i < 2; ++i) sum[r][i] = multiply_add(columns[i], lane, sum[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < 2; ++i)
      std::memcpy(c + r * c_stride + i * kFloats, &sum[r][i], sizeof(Floats));
}

// Functions for 1, 2, ... rows.
template <class Lanes, int... kIndex>
constexpr auto functions(std::integer_sequence<int, kIndex...>) {
  return std::array{&multiply_rows<Lanes, kIndex + 1>...};
}

// c += a @ b. The number of columns is rounded up to a multiple of kColumns.
template <class Lanes>
void multiply(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t rows,
              int64_t columns, int64_t depth, float* c, int64_t c_stride) {
  static constexpr auto kMultiply = functions<Lanes>(std::make_integer_sequence<int, kRowsAtOnce>());
  for (int64_t column = 0; column < columns; column += kColumns)
    for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
      int64_t num_rows = std::min<int64_t>(kRowsAtOnce, rows - r);
      kMultiply[num_rows - 1](static_cast<const char*>(a) + 4 * r * a_stride, a_stride,
                              static_cast<const char*>(b) + 4 * column, b_stride, depth,
                              c + r * c_stride + column, c_stride);
    }
}

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// One thread's tiles, and the sums of a task's rows.
template <class T, class Width>
class Task {
  using Part = typename Tile<T>::Part;
  using Lanes = typename Tile<T>::Lanes;
  static constexpr int64_t kParts = Tile<T>::kParts;

 public:
  Task(int64_t max_rows, int64_t group, Width width)
      : group_(group),
        width_(width),
        depth_(round_up(width, kParts) / kParts),
        columns_(round_up(width, kColumns)),
        q_(max_rows * depth_ * kParts),
        k_(depth_ * kParts * kKeys),
        v_(kKeys * columns_),
        weight_(max_rows * kKeys),
        score_(max_rows * kKeys),
        o_(max_rows * columns_),
        top_(max_rows),
        total_(max_rows) {}

  // Row r of the task is head r % group of the token r / group, which lies `stride` behind the one
  // before.
  void begin(const T* q, int64_t stride, int64_t num_tokens) {
    rows_ = num_tokens * group_;
    for (int64_t r = 0; r < rows_; ++r) {
      const T* query = q + r / group_ * stride + r % group_ * width_;
      Part* line = &q_[r * depth_ * kParts];
      for (int64_t h = 0; h < width_; ++h) put(line[h], get(query[h]));
    }
    std::fill_n(o_.begin(), rows_ * columns_, 0.0f);
    std::fill_n(top_.begin(), rows_, -INFINITY);
    std::fill_n(total_.begin(), rows_, 0.0f);
  }

  // Copy key and value number l of a block into the tiles.
  void copy(int64_t l, const T* k, const T* v) {
    Part* column = &k_[l * kParts];
    for (int64_t h = 0; h < width_; ++h)
      put(column[h / kParts * kKeys * kParts + h % kParts], get(k[h]));
    Part* line = &v_[l / kParts * columns_ * kParts + l % kParts];
    for (int64_t h = 0; h < width_; ++h) put(line[h * kParts], get(v[h]));
  }

  // Attend to the block, whose first key stands at `key`; the first token's query at `position`.
  void attend(int64_t key, int64_t num_keys, int64_t position, int64_t window, float scale) {
    std::fill_n(score_.begin(), rows_ * kKeys, 0.0f);
    multiply<Lanes>(q_.data(), depth_, k_.data(), kKeys, rows_, num_keys, depth_, score_.data(),
                    kKeys);
    for (int64_t r = 0; r < rows_; ++r) {
      int64_t end = position + r / group_ + 1;
      int64_t begin = window ? std::max<int64_t>(0, end - window) : 0;
      add_weights(r, std::clamp<int64_t>(begin - key, 0, num_keys),
                  std::clamp<int64_t>(end - key, 0, num_keys), scale);
    }
    int64_t depth = round_up(num_keys, kParts) / kParts;
    multiply<Lanes>(weight_.data(), kKeys / kParts, v_.data(), columns_, rows_, width_, depth,
                    o_.data(), columns_);
  }

  void finish(T* o, int64_t stride) const {
    for (int64_t r = 0; r < rows_; ++r) {
      T* output = o + r / group_ * stride + r % group_ * width_;
      float share = 1.0f / total_[r];
      for (int64_t h = 0; h < width_; ++h) put(output[h], o_[r * columns_ + h] * share);
    }
  }

 private:
  // Weights of the block's keys [begin, end) for a row; the sums so far are scaled to the new top.
  void add_weights(int64_t r, int64_t begin, int64_t end, float scale) {
    float *score = &score_[r * kKeys], *o = &o_[r * columns_];
    Part* weight = &weight_[r * kKeys];
    std::fill_n(weight, kKeys, Part(0));
    if (begin >= end) return;
    float top = score[begin], total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t l = begin; l < end; ++l) top = std::max(top, score[l]);
    top *= scale;
    if (top > top_[r]) {
      float factor = exp_nonpositive(top_[r] - top);
      top_[r] = top;
      total_[r] *= factor;
#pragma omp simd
      for (int64_t h = 0; h < columns_; ++h) o[h] *= factor;
    }
    top = top_[r];
#pragma omp simd reduction(+ : total)
    for (int64_t l = begin; l < end; ++l) {
      float x = exp_nonpositive(score[l] * scale - top);
      total += x;
      put(weight[l], x);
    }
    total_[r] += total;
  }

  int64_t group_;
  Width width_;
  int64_t depth_, columns_, rows_ = 0;
  std::vector<Part> q_, k_, v_, weight_;
  std::vector<float> score_, o_, top_, total_;
};

// Tokens of a task: many, so that keys and values are copied seldom, if all threads have some.
int64_t tokens_per_task(const Integers& lengths, int64_t num_slices, int64_t num_kv_heads,
                        int64_t group) {
  int64_t num_tokens = std::max<int64_t>(1, kMaxRows / group);
  auto has_enough = [&] {
    int64_t num_tasks = 0;
    for (int64_t b = 0; b < num_slices; ++b)
      num_tasks += (lengths[b] + num_tokens - 1) / num_tokens * num_kv_heads;
    return num_tasks >= kTasksPerThread * omp_get_max_threads();
  };
  while (num_tokens * group >= 2 * kMinRows && !has_enough()) num_tokens /= 2;
  return num_tokens;
}

// Some tokens of a slice.
struct Tokens {
  int64_t slice, first, length;
};

}  // namespace

// The tokens [token, token + length) of each slice against the paged context of its row. They stand
// at positions [start, start + length), and see those up to their own, or the last `window` of them
// if that is not zero.
void attend_prompts(TensorView q_TNH, TensorView k_SKH, TensorView v_SKH, TensorView page_table_RP,
                    int64_t page_size, TensorView token_B, TensorView row_B, TensorView start_B,
                    TensorView length_B, TensorView o_TNH, double scale, int64_t window) {
  Integers tokens(token_B), rows(row_B), starts(start_B), lengths(length_B);
  int64_t num_slices = token_B.size(0), num_kv_heads = k_SKH.size(1);
  int64_t group = q_TNH.size(1) / num_kv_heads;
  int64_t block = tokens_per_task(lengths, num_slices, num_kv_heads, group);
  std::vector<Tokens> blocks;
  for (int64_t b = 0; b < num_slices; ++b)
    for (int64_t first = 0; first < lengths[b]; first += block)
      blocks.push_back({b, first, std::min(block, lengths[b] - first)});
  int64_t num_tasks = static_cast<int64_t>(blocks.size()) * num_kv_heads;

  auto attend = [&](auto zero, auto width) {
    using T = decltype(zero);
#pragma omp parallel
    {
      Task<T, decltype(width)> task(block * group, group, width);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < num_tasks; ++i) {
        auto [b, first, length] = blocks[blocks.size() - 1 - i / num_kv_heads];  // longest first
        int64_t kv_head = i % num_kv_heads, head = kv_head * group * width;
        int64_t position = starts[b] + first, end = position + length;
        int64_t begin = window ? std::max<int64_t>(0, position + 1 - window) : 0;
        const int32_t* pages = row<int32_t>(page_table_RP, rows[b]);
        task.begin(row<T>(q_TNH, tokens[b] + first) + head, q_TNH.stride(0), length);
        for (int64_t key = begin; key < end; key += kKeys) {
          int64_t num_keys = std::min(kKeys, end - key);
          for (int64_t l = 0; l < num_keys; ++l) {
            int64_t slot = pages[(key + l) / page_size] * page_size + (key + l) % page_size;
            task.copy(l, row<T>(k_SKH, slot) + kv_head * k_SKH.stride(1),
                      row<T>(v_SKH, slot) + kv_head * v_SKH.stride(1));
          }
          task.attend(key, num_keys, position, window, float(scale));
        }
        task.finish(row<T>(o_TNH, tokens[b] + first) + head, o_TNH.stride(0));
      }
    }
  };
  for_dtype(q_TNH, [&](auto zero) {
    for_width(q_TNH.size(2), [&](auto width) { attend(zero, width); });
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_prompts, attend_prompts);
