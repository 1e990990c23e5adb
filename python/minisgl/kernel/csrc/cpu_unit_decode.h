// Attention of single queries in a processor's matrix unit.
//
// Keys and values are read where they lie in their pages. A key is a row of a tile, and a query a
// column, so a tile has the scores of 16 keys. For values the unit needs pairs of keys side by
// side, but a page has pairs of columns side by side. So a weight is paired with a zero: if the
// zero comes after it, a product has the even columns, and if it comes before, the odd ones.
//
// A block is prefetched while the one before it is computed, a few cache lines at a time: a core
// that has as many loads in flight as it can stalls on whatever follows.

#pragma once

#include "cpu_matrix_unit.h"

#ifdef MINISGL_HAS_MATRIX_UNIT

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_pages.h"
#include "cpu_query_sums.h"

namespace {

constexpr int64_t kBlockTiles = kKeys / kTileRows;  // tiles of keys in a block

// Prefetches the next block, some keys at a time. A cache line has as many numbers as a tile's row.
template <class Width>
class Fetch {
 public:
  Fetch(const Block<bf16>& block, Width width) : block_(block), width_(width) {}

  // Prefetch the next `num` keys and their values.
  void ask(int64_t num) {
    for (int64_t end = std::min(key_ + num, block_.num_keys); key_ < end; ++key_)
      for (int64_t h = 0; h < width_; h += kTileInputs) {
        __builtin_prefetch(block_.k[key_] + h, 0, 2);
        __builtin_prefetch(block_.v[key_] + h, 0, 2);
      }
  }

 private:
  const Block<bf16>& block_;
  Width width_;
  int64_t key_ = 0;
};

// Where the rows of each tile of a block are: `stride` numbers apart, in their pages or in a copy.
class TileRows {
 public:
  TileRows(int64_t width, int64_t stride)
      : width_(width), stride_(std::max(width, stride)), copies_(kKeys * stride_) {}

  // Find the rows of `num_keys` keys. A tile whose rows are a stride apart is read in place; the
  // rows of any other are copied. So are those of a tile that is not full, since a block repeats
  // its last key there.
  void find(const std::array<const bf16*, kKeys>& rows, int64_t num_keys) {
    for (int64_t t = 0; t * kTileRows < num_keys; ++t) {
      const bf16* const* row = &rows[t * kTileRows];
      bool is_in_place = true;
      for (int64_t i = 1; i < kTileRows; ++i) is_in_place &= row[i] == row[0] + i * stride_;
      first_[t] = is_in_place ? row[0] : copy(row, &copies_[t * kTileRows * stride_]);
    }
  }

  const bf16* tile(int64_t t) const { return first_[t]; }
  int64_t row_bytes() const { return stride_ * sizeof(bf16); }

 private:
  const bf16* copy(const bf16* const* row, bf16* place) const {
    for (int64_t i = 0; i < kTileRows; ++i)
      std::memcpy(place + i * stride_, row[i], width_ * sizeof(bf16));
    return place;
  }

  int64_t width_, stride_;
  std::vector<bf16> copies_;
  std::array<const bf16*, kBlockTiles> first_;
};

// One thread's queries, and their sums so far. Of each 32 columns of sums the even ones come first.
//
// Registers of the unit: 0 and 1 scores, 2 keys, 3 queries or values, 4 and 5 sums of even and of
// odd columns, 6 and 7 weights for them. The last four have a row for each query.
template <class Width>
class UnitQueries {
 public:
  // k_stride, v_stride: the distance of the keys, or values, of two neighbouring tokens.
  UnitQueries(int64_t group, Width width, int64_t k_stride, int64_t v_stride)
      : group_(group),
        width_(width),
        k_(width, k_stride),
        v_(width, v_stride),
        q_(num_tiles(group) * width / 2),
        sums_(group, width, num_tiles(group) * num_rows(group)) {}

  // The rows of a register that has one for each query.
  static int64_t num_rows(int64_t group) { return std::min(group, kTileRows); }

  void begin(const bf16* q) {
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t h = 0; h < width_ / 2; ++h)
        q_[g / kTileRows * width_ / 2 + h][g % kTileRows] = load<uint32_t>(q + g * width_ + 2 * h);
    sums_.clear();
  }

  // Add a block to the sums. The next block is prefetched on the way: nearly all of it with three
  // queries of 64 numbers. The rest is prefetched at the end.
  void attend(const Block<bf16>& block, const Block<bf16>& next, float scale) {
    num_tiles_ = num_tiles(block.num_keys);
    k_.find(block.k, block.num_keys);
    v_.find(block.v, block.num_keys);
    Fetch<Width> fetch(next, width_);
    for (int64_t g = 0; g < group_; g += kTileRows) {
      multiply_keys(g, fetch);
      turn_scores(fetch);
      for (int64_t i = 0; i < std::min(kTileRows, group_ - g); ++i)
        weigh(g, i, block.num_keys, scale, fetch);
      add_values(g, fetch);
    }
    fetch.ask(kKeys);
  }

  void write(bf16* o) const {
    for (int64_t g = 0; g < group_; ++g) {
      float share = 1.0f / sums_.total(g);
      for (int64_t h = 0; h < width_; h += kTileInputs) {
        Pairs even = rounded(load<Floats>(sums_.o(g) + h) * share);
        Pairs odd = rounded(load<Floats>(sums_.o(g) + h + kFloats) * share);
        Pairs pairs = even >> 16 | odd;
        std::memcpy(o + g * width_ + h, &pairs, sizeof(pairs));
      }
    }
  }

  QuerySums& sums() { return sums_; }

 private:
  static int64_t num_tiles(int64_t rows) { return round_up(rows, kTileRows) / kTileRows; }

  // The scores of 16 queries from g on: a line of queries for each key. The number of tiles is
  // rounded up to an even one. Scores after the last key are masked later.
  void multiply_keys(int64_t g, Fetch<Width>& fetch) {
    finish_writes();
    const Pairs* q = &q_[g / kTileRows * width_ / 2];
    for (int64_t t = 0; t < num_tiles_; t += 2) {
      const bf16 *first = k_.tile(t), *second = k_.tile(std::min(t + 1, num_tiles_ - 1));
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t h = 0; h < width_; h += kTileInputs) {
        _tile_loadd(3, q + h / 2, kTileBytes);
        _tile_loadd(2, first + h, k_.row_bytes());
        _tile_dpbf16ps(0, 2, 3);
        fetch.ask(1);
        _tile_loadd(2, second + h, k_.row_bytes());
        _tile_dpbf16ps(1, 2, 3);
        fetch.ask(1);
      }
      _tile_stored(0, scores_[t], kTileBytes);
      _tile_stored(1, scores_[t + 1], kTileBytes);
    }
  }

  // Transpose the scores: a line of keys for each query.
  void turn_scores(Fetch<Width>& fetch) {
    for (int64_t t = 0; t < num_tiles_; ++t) {
      transpose(scores_[t]);
      fetch.ask(3);
    }
  }

  // Turn the scores of query g + i into weights, and scale its earlier sums to them.
  void weigh(int64_t g, int64_t i, int64_t num_keys, float scale, Fetch<Width>& fetch) {
    static constexpr Ints kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats hidden = Floats{} - INFINITY;
    Floats score[kBlockTiles], tops = hidden, total{};
    for (int64_t t = 0; t < num_tiles_; ++t) {
      Ints left = Ints{} + static_cast<int32_t>(num_keys - t * kTileRows);
      score[t] = kLanes < left ? (Floats)scores_[t][i] * scale : hidden;
      tops = score[t] > tops ? score[t] : tops;
    }
    float top = std::max(sums_.top(g + i), _mm512_reduce_max_ps((__m512)tops));
    for (int64_t t = 0; t < num_tiles_; ++t) {
      Floats weight = exp_nonpositive(score[t] - top);
      total += weight;
      Pairs odd = rounded(weight);
      weights_[t][0][i] = odd >> 16;
      weights_[t][1][i] = odd;
      fetch.ask(2);
    }
    float factor = sums_.add_total(g + i, top, _mm512_reduce_add_ps((__m512)total));
    if (factor == 1.0f) return;
    float* o = sums_.o(g + i);
    for (int64_t h = 0; h < width_; ++h) o[h] *= factor;
  }

  void add_values(int64_t g, Fetch<Width>& fetch) {
    finish_writes();
    int64_t sums_bytes = width_ * sizeof(float);
    for (int64_t h = 0; h < width_; h += kTileInputs) {
      float* o = sums_.o(g) + h;
      _tile_loadd(4, o, sums_bytes);
      _tile_loadd(5, o + kFloats, sums_bytes);
      for (int64_t t = 0; t < num_tiles_; ++t) {
        _tile_loadd(3, v_.tile(t) + h, v_.row_bytes());
        _tile_loadd(6, weights_[t][0], kTileBytes);
        _tile_dpbf16ps(4, 6, 3);
        _tile_loadd(7, weights_[t][1], kTileBytes);
        _tile_dpbf16ps(5, 7, 3);
        fetch.ask(3);
      }
      _tile_stored(4, o, sums_bytes);
      _tile_stored(5, o + kFloats, sums_bytes);
    }
  }

  int64_t group_;
  Width width_;
  TileRows k_, v_;
  int64_t num_tiles_ = 0;  // tiles of the block's keys
  std::vector<Pairs> q_;   // for each 16 queries, lines of a pair of each
  Pairs scores_[kBlockTiles][kTileRows] = {};
  Pairs weights_[kBlockTiles][2][kTileRows] = {};  // paired with a zero: before it, and after it
  QuerySums sums_;
};

}  // namespace

#else

namespace {

template <class Width>
class UnitQueries;

}  // namespace

#endif
