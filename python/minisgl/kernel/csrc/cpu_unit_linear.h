// The product of tokens with a bfloat16 weight in a processor's matrix unit.
//
// The weight's rows are read where they lie. Only the tokens are rearranged, once: a tile of them
// has pairs of inputs of 16 tokens.
//
// Dimensions: I inputs of a linear layer, O outputs of a linear layer, T tokens of a step.

#pragma once

#include "cpu_matrix_unit.h"

#ifdef MINISGL_HAS_MATRIX_UNIT

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "divided_loop.h"
#include "transpose.h"

namespace {

constexpr int64_t kPanel = 2 * kTileRows;  // outputs, or tokens, of one product
constexpr int64_t kChunkBytes = 1 << 20;   // bytes of tokens, which stay in a core's L2 cache
constexpr int64_t kTasksOfThread = 4;      // tasks at least, so that threads end together

// Some tokens in panels; the last token is repeated to fill a panel. For each 32 inputs in turn, a
// panel has two tiles: one of its first 16 tokens, and one of the others.
class TokenTiles {
 public:
  TokenTiles(const TensorView& x_TI, int64_t most)
      : x_TI_(x_TI),
        num_steps_(x_TI.size(1) / kTileInputs),
        pairs_(new Pairs[round_up(most, kPanel) * num_steps_]) {}

  // Choose the tokens that `read` reads.
  void choose(int64_t begin, int64_t end) {
    begin_ = begin;
    end_ = end;
  }

  int64_t num_steps() const { return num_steps_; }
  int64_t num_panels() const { return round_up(end_ - begin_, kPanel) / kPanel; }
  int64_t first_token(int64_t p) const { return begin_ + p * kPanel; }
  int64_t num_tokens(int64_t p) const { return std::min(kPanel, end_ - first_token(p)); }
  Operand panel(int64_t p) const {
    const Pairs* first = &pairs_[p * num_steps_ * kPanel];
    return {first, first + kTileRows, kTileBytes, 2 * kTileRows * kTileBytes};
  }

  // To be called by all threads of a parallel region. They go on when all tokens are read.
  void read() {
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < 2 * num_panels(); ++tile) {
      int64_t first = begin_ + tile * kTileRows;
      const bf16* rows[kTileRows];
      for (int64_t t = 0; t < kTileRows; ++t)
        rows[t] = row<const bf16>(x_TI_, std::min(first + t, end_ - 1));
      for (int64_t s = 0; s < num_steps_; ++s) {
        Pairs square[kFloats];
        for (int64_t t = 0; t < kTileRows; ++t)
          std::memcpy(&square[t], rows[t] + s * kTileInputs, sizeof(Pairs));
        transpose(square);
        Pairs* place = &pairs_[((tile / 2 * num_steps_ + s) * 2 + tile % 2) * kTileRows];
        for (int64_t t = 0; t < kTileRows; ++t) place[t] = square[t];
      }
    }
  }

 private:
  const TensorView& x_TI_;
  int64_t num_steps_, begin_ = 0, end_ = 0;
  std::unique_ptr<Pairs[]> pairs_;
};

// Two rows of sums as pairs of bfloat16, rounded to nearest, ties to even.
inline Pairs pairs_of(Floats low, Floats high) {
  typedef uint16_t Halves __attribute__((vector_size(4 * kFloats)));
  constexpr Halves kInterleaved = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  auto both = (Halves)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  return (Pairs)__builtin_shuffle(both, kInterleaved);
}

// Products of panels of outputs with panels of tokens. The sums of one product are written while
// the next one is computed, which leaves the vector units idle.
class PanelProducts {
 public:
  PanelProducts(const TensorView& weight_OI, const bf16* bias, const TensorView& y_TO)
      : weight_(row<const bf16>(weight_OI, 0)),
        stride_(weight_OI.stride(0)),
        num_outputs_(weight_OI.size(0)),
        bias_(bias),
        y_TO_(y_TO) {}
  ~PanelProducts() {
    for (int64_t t = 0; t < kPanel; t += kTileRows) write(t);
  }

  // Multiply the panel of outputs from `output` on with the panels [begin, end) of tokens.
  void multiply(int64_t output, const TokenTiles& tokens, int64_t begin, int64_t end) {
    if (num_outputs_ - output >= kPanel)
      multiply<2>(output, tokens, begin, end);
    else
      multiply<1>(output, tokens, begin, end);
  }

 private:
  // The sums of a product, and for which outputs and tokens they are.
  struct Sums {
    alignas(64) float sums_OT[kPanel][kPanel];
    int64_t output = 0, num_outputs = 0, token = 0, num_tokens = 0;
  };

  // Meanwhile each panel of tokens prefetches a part of the weights that come next.
  template <int kRows>
  void multiply(int64_t output, const TokenTiles& tokens, int64_t begin, int64_t end) {
    const bf16* weight = weight_ + output * stride_;
    int64_t row_bytes = stride_ * sizeof(bf16), step = kTileInputs * sizeof(bf16);
    Operand outputs{weight, weight + kTileRows * stride_, row_bytes, step};
    int64_t num_panels = end - begin, num_steps = tokens.num_steps();
    int64_t next = output + kPanel, num_next = std::clamp<int64_t>(num_outputs_ - next, 0, kPanel);
    for (int64_t p = begin; p < end; ++p) {
      int64_t share = num_next * (p - begin) / num_panels;
      const bf16* fetched = weight_ + (next + share) * stride_;
      int64_t num_fetched = num_next * (p - begin + 1) / num_panels - share;
      auto meanwhile = [&](int64_t s) {
        for (int64_t r = 0; r < num_fetched; ++r)
          __builtin_prefetch(fetched + r * stride_ + s * kTileInputs, 0, 2);
        if (s == 0) write(0);
        if (s == num_steps / 2) write(kTileRows);
      };
      clear_sums();
      Sums& sums = sums_[1 - unwritten_];
      if (tokens.num_tokens(p) > kTileRows) {
        add_products<kRows, 2>(outputs, tokens.panel(p), num_steps, meanwhile);
        store_sums<kRows, 2>({&sums.sums_OT[0][0], kPanel});
      } else {
        add_products<kRows, 1>(outputs, tokens.panel(p), num_steps, meanwhile);
        store_sums<kRows, 1>({&sums.sums_OT[0][0], kPanel});
      }
      sums.output = output, sums.num_outputs = kRows * kTileRows;
      sums.token = tokens.first_token(p), sums.num_tokens = tokens.num_tokens(p);
      unwritten_ = 1 - unwritten_;
    }
  }

  // Write the outputs of up to 16 tokens, whose sums begin at column `t`.
  void write(int64_t t) const {
    const Sums& sums = sums_[unwritten_];
    int64_t num_tokens = std::clamp<int64_t>(sums.num_tokens - t, 0, kTileRows);
    if (!num_tokens) return;
    Pairs square[kFloats] = {};
    for (int i = 0; i < sums.num_outputs / 2; ++i) {
      Floats low, high;
      std::memcpy(&low, &sums.sums_OT[2 * i][t], sizeof(low));
      std::memcpy(&high, &sums.sums_OT[2 * i + 1][t], sizeof(high));
      if (bias_) {
        low += get(bias_[sums.output + 2 * i]);
        high += get(bias_[sums.output + 2 * i + 1]);
      }
      square[i] = pairs_of(low, high);
    }
    transpose(square);
    // With a constant size, a row is written by one store, not by a call of memcpy.
    auto write_rows = [&](auto num_outputs) {
      for (int64_t i = 0; i < num_tokens; ++i) {
        bf16* y = row<bf16>(y_TO_, sums.token + t + i) + sums.output;
        std::memcpy(y, &square[i], num_outputs * sizeof(bf16));
      }
    };
    if (sums.num_outputs == kPanel)
      write_rows(std::integral_constant<int64_t, kPanel>{});
    else
      write_rows(std::integral_constant<int64_t, kTileRows>{});
  }

  const bf16* weight_;
  int64_t stride_, num_outputs_;
  const bf16* bias_;
  const TensorView& y_TO_;
  Sums sums_[2];
  int unwritten_ = 0;  // which of the two is still to be written
};

// Whether the unit can multiply a weight, with any number of tokens.
inline bool matrix_unit_takes(TensorView weight_OI) {
  bool fits = weight_OI.size(0) % kTileRows == 0 && weight_OI.size(1) % kTileInputs == 0;
  return fits && weight_OI.numel() > 0 && has_matrix_unit();
}

// Tokens are multiplied in chunks. Each chunk reads the weight again, which then is in the
// last-level cache. If there are too few panels of outputs for all threads, the panels of tokens
// are divided, too.
inline void multiply_in_matrix_unit(const TensorView& x_TI, const TensorView& weight_OI,
                                    const bf16* bias, const TensorView& y_TO) {
  int64_t num_tokens = x_TI.size(0), num_panels = round_up(weight_OI.size(0), kPanel) / kPanel;
  int64_t token_bytes = x_TI.size(1) * sizeof(bf16);
  int64_t fitting = std::max(kPanel, kChunkBytes / token_bytes);
  int64_t num_chunks = (num_tokens + fitting - 1) / fitting;
  int64_t chunk = round_up((num_tokens + num_chunks - 1) / num_chunks, kPanel);
  TokenTiles tokens(x_TI, std::min(chunk, num_tokens));
  for (int64_t begin = 0; begin < num_tokens; begin += chunk) {
    int64_t end = std::min(begin + chunk, num_tokens);
    tokens.choose(begin, end);
    int64_t num_token_panels = tokens.num_panels();
    int64_t wanted = (kTasksOfThread * omp_get_max_threads() + num_panels - 1) / num_panels;
    int64_t num_parts = std::min(wanted, num_token_panels);
    DividedLoop tasks(num_panels * num_parts);
#pragma omp parallel if (weight_OI.numel() > kParallelWork)
    {
      tokens.read();
      MatrixUnit unit;
      PanelProducts products(weight_OI, bias, y_TO);
      for (int64_t i = tasks.next(); i >= 0; i = tasks.next()) {
        int64_t output = i / num_parts * kPanel, part = i % num_parts;
        products.multiply(output, tokens, num_token_panels * part / num_parts,
                          num_token_panels * (part + 1) / num_parts);
      }
    }
  }
}

}  // namespace

#else

namespace {

inline bool matrix_unit_takes(TensorView) { return false; }
inline void multiply_in_matrix_unit(const TensorView&, const TensorView&, const bf16*,
                                    const TensorView&) {}

}  // namespace

#endif
