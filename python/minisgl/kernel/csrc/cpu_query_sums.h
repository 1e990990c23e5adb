// The running sums of single queries over their contexts.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu.h"

namespace {

// For each query head that shares a kv head: a row of `width` weighted sums of values, and the sum
// of the weights, which are relative to exp(top). There may be more rows than query heads.
class QuerySums {
 public:
  QuerySums(int64_t group, int64_t width, int64_t num_rows)
      : group_(group), width_(width), o_(num_rows * width), top_(group), total_(group) {}

  // How many floats `save` writes.
  static int64_t num_floats(int64_t group, int64_t width) { return group * (width + 2); }

  float* o(int64_t g) { return &o_[g * width_]; }
  const float* o(int64_t g) const { return &o_[g * width_]; }
  float top(int64_t g) const { return top_[g]; }
  float total(int64_t g) const { return total_[g]; }

  void clear() {
    std::fill(o_.begin(), o_.end(), 0.0f);
    std::fill(top_.begin(), top_.end(), -INFINITY);
    std::fill(total_.begin(), total_.end(), 0.0f);
  }

  // Add a sum of weights relative to exp(top), where top is not lower than before. Returns the
  // factor by which the caller has to scale the row.
  float add_total(int64_t g, float top, float total) {
    float factor = exp_nonpositive(top_[g] - top);
    top_[g] = top;
    total_[g] = total_[g] * factor + total;
    return factor;
  }

  void save(float* sums) const {
    sums = std::copy_n(o_.begin(), group_ * width_, sums);
    sums = std::copy(top_.begin(), top_.end(), sums);
    std::copy(total_.begin(), total_.end(), sums);
  }

  // Take the sums that were saved for several ranges, one after the other in memory, and merge
  // them.
  void merge(const float* sums, int64_t num_ranges) {
    int64_t size = group_ * width_;
    std::copy_n(sums, size, o_.data());
    std::copy_n(sums + size, group_, top_.data());
    std::copy_n(sums + size + group_, group_, total_.data());
    for (int64_t i = 1; i < num_ranges; ++i) {
      sums += num_floats(group_, width_);
      const float *tops = sums + size, *totals = tops + group_;
      for (int64_t g = 0; g < group_; ++g) {
        float top = std::max(top_[g], tops[g]), other = exp_nonpositive(tops[g] - top);
        float factor = add_total(g, top, totals[g] * other);
        const float* row = sums + g * width_;
#pragma omp simd
        for (int64_t h = 0; h < width_; ++h)
          o_[g * width_ + h] = o_[g * width_ + h] * factor + row[h] * other;
      }
    }
  }

 private:
  int64_t group_, width_;
  std::vector<float> o_, top_, total_;
};

}  // namespace
