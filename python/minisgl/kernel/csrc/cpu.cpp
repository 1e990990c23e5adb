// The small steps between a CPU's matrix products, each in one pass over its data.
//
// torch runs each as several operators of a few microseconds; a decode of one token has a few
// hundred of them. References and contracts stand beside the Python wrappers.
//
// Dimensions: B requests of a step, D model width, F mlp width, H head width, K kv heads, L
// positions of a sequence, M all heads of a token: N + 2 K, N query heads, P pages, Q positions of
// a page, R rows of the tables, T tokens of a step, V vocabulary, W words of 32 bits, X a selection
// out of another dimension, Z entries of a flat list.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu.h"

namespace {

template <class T>
float inverse_rms(const T* x, int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) sum += get(x[i]) * get(x[i]);
  return 1.0f / std::sqrt(sum / float(width) + eps);
}

template <class T>
void normalize(const T* x, const T* weight, int64_t width, float eps, T* y) {
  float scale = inverse_rms(x, width, eps);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) put(y[i], get(x[i]) * scale * get(weight[i]));
}

// softmax(x * scale) in place. A buffer keeps the exponentials as floats until their sum is known.
template <class T>
void softmax(T* x, int64_t length, float scale, float* buffer) {
  float top = get(x[0]), total = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < length; ++i) top = std::max(top, get(x[i]));
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < length; ++i)
    total += buffer[i] = exp_nonpositive((get(x[i]) - top) * scale);
  float share = 1.0f / total;
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) put(x[i], buffer[i] * share);
}

}  // namespace

void rms_norm(TensorView x_TD, TensorView weight_D, double eps, TensorView y_TD) {
  for_dtype(x_TD, [&](auto zero) {
    using T = decltype(zero);
    int64_t rows = x_TD.size(0), width = x_TD.size(1);
#pragma omp parallel for if (rows * width > kParallelWork)
    for (int64_t t = 0; t < rows; ++t)
      normalize(row<T>(x_TD, t), row<T>(weight_D, 0), width, float(eps), row<T>(y_TD, t));
  });
}

void add_rms_norm(TensorView x_TD, TensorView residual_TD, TensorView weight_D, double eps,
                  TensorView y_TD) {
  for_dtype(x_TD, [&](auto zero) {
    using T = decltype(zero);
    int64_t rows = x_TD.size(0), width = x_TD.size(1);
#pragma omp parallel for if (rows * width > kParallelWork)
    for (int64_t t = 0; t < rows; ++t) {
      T *x = row<T>(x_TD, t), *residual = row<T>(residual_TD, t);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) put(residual[i], get(x[i]) + get(residual[i]));
      normalize(residual, row<T>(weight_D, 0), width, float(eps), row<T>(y_TD, t));
    }
  });
}

void silu_and_mul(TensorView gate_TF, TensorView up_TF, TensorView y_TF) {
  for_dtype(gate_TF, [&](auto zero) {
    using T = decltype(zero);
    int64_t rows = gate_TF.size(0), width = gate_TF.size(1);
#pragma omp parallel for if (rows * width > kParallelWork)
    for (int64_t t = 0; t < rows; ++t) {
      T *gate = row<T>(gate_TF, t), *up = row<T>(up_TF, t), *y = row<T>(y_TF, t);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        float g = get(gate[i]), e = exp_nonpositive(-std::abs(g));
        put(y[i], g * (g < 0 ? e : 1.0f) / (1.0f + e) * get(up[i]));
      }
    }
  });
}

// Normalizes queries and keys (if q_norm_H has elements) and rotates them, in place, and copies
// keys and values to their slots.
void rotate_and_store(TensorView qkv_TMH, TensorView q_norm_H, TensorView k_norm_H, double eps,
                      TensorView cos_LH, TensorView sin_LH, TensorView position_T,
                      TensorView slot_T, TensorView k_PQKH, TensorView v_PQKH) {
  for_dtype(qkv_TMH, [&](auto zero) {
    using T = decltype(zero);
    int64_t num_tokens = qkv_TMH.size(0), width = qkv_TMH.size(2), half = width / 2;
    int64_t num_kv_heads = k_PQKH.size(2), num_heads = qkv_TMH.size(1) - 2 * num_kv_heads;
    bool has_norm = q_norm_H.size(0) > 0;
    Integers positions(position_T), slots(slot_T);
    Pages keys(k_PQKH), values(v_PQKH);
#pragma omp parallel for if (qkv_TMH.numel() > kParallelWork)
    for (int64_t t = 0; t < num_tokens; ++t) {
      const T *cos = row<T>(cos_LH, positions[t]), *sin = row<T>(sin_LH, positions[t]);
      for (int64_t m = 0; m < num_heads + num_kv_heads; ++m) {
        T* x = row<T>(qkv_TMH, t) + m * width;
        if (has_norm)
          normalize(x, row<T>(m < num_heads ? q_norm_H : k_norm_H, 0), width, float(eps), x);
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          float a = get(x[i]), b = get(x[i + half]);
          put(x[i], a * get(cos[i]) + b * get(sin[i]));
          put(x[i + half], b * get(cos[i + half]) + a * get(sin[i + half]));
        }
      }
      int64_t page = slots[t] / keys.size, position = slots[t] % keys.size;
      for (int64_t h = 0; h < num_kv_heads; ++h) {
        const T* k = row<T>(qkv_TMH, t) + (num_heads + h) * width;
        std::copy_n(k, width, keys.at<T>(page, position, h));
        std::copy_n(k + num_kv_heads * width, width, values.at<T>(page, position, h));
      }
    }
  });
}

// Softmax of each row of scores, in place. Row r belongs to query q = r % length, which sees keys
// [0, start + q], or the last `window` of these unless `window` is 0.
void causal_softmax(TensorView score_KZL, int64_t start, int64_t length, double scale,
                    int64_t window) {
  for_dtype(score_KZL, [&](auto zero) {
    using T = decltype(zero);
    int64_t rows = score_KZL.size(0) * score_KZL.size(1), width = score_KZL.size(2);
#pragma omp parallel if (rows * width > kParallelWork)
    {
      std::vector<float> buffer(width);
#pragma omp for
      for (int64_t r = 0; r < rows; ++r) {
        T* scores = static_cast<T*>(score_KZL.data_ptr()) + r * width;
        int64_t end = start + r % length + 1;  // each head's rows are a multiple of length
        int64_t begin = window ? std::max<int64_t>(0, end - window) : 0;
        std::fill(scores, scores + begin, T(0));
        softmax(scores + begin, end - begin, float(scale), buffer.data());
        std::fill(scores + end, scores + width, T(0));
      }
    }
  });
}

void mask_logits(TensorView logits_BV, TensorView mask_B, TensorView bits_XW) {
  for_dtype(logits_BV, [&](auto zero) {
    using T = decltype(zero);
    T lowest;
    put(lowest, -INFINITY);
    const auto* masks = static_cast<const int32_t*>(mask_B.data_ptr());
    for (int64_t b = 0; b < mask_B.size(0); ++b) {
      if (masks[b] < 0) continue;
      const auto* words = row<const uint32_t>(bits_XW, masks[b]);
      T* logits = row<T>(logits_BV, b);
      for (int64_t v = 0; v < logits_BV.size(1); ++v)
        logits[v] = words[v / 32] >> (v % 32) & 1 ? logits[v] : lowest;
    }
  });
}

// table[index] = max(value, 0) over a flat index.
void scatter(TensorView table, TensorView index_Z, TensorView value_Z) {
  auto* entries = static_cast<int32_t*>(table.data_ptr());
  const auto* indices = static_cast<const int32_t*>(index_Z.data_ptr());
  const auto* values = static_cast<const int32_t*>(value_Z.data_ptr());
  for (int64_t z = 0; z < index_Z.size(0); ++z) entries[indices[z]] = std::max(values[z], 0);
}

// Copies rows of a weight, for example the embeddings of tokens.
void take_rows(TensorView weight_VD, TensorView token_T, TensorView y_TD) {
  for_dtype(weight_VD, [&](auto zero) {
    using T = decltype(zero);
    Integers tokens(token_T);
    for (int64_t t = 0; t < token_T.size(0); ++t)
      std::copy_n(row<T>(weight_VD, tokens[t]), weight_VD.size(1), row<T>(y_TD, t));
  });
}

// The token at each row and position, and the slot of its keys and values.
void look_up(TensorView row_T, TensorView position_T, TensorView token_pool_RL,
             TensorView page_table_RP, int64_t page_size, TensorView token_T, TensorView slot_T) {
  const auto* rows = static_cast<const int32_t*>(row_T.data_ptr());
  const auto* positions = static_cast<const int32_t*>(position_T.data_ptr());
  auto* tokens = static_cast<int64_t*>(token_T.data_ptr());
  auto* slots = static_cast<int64_t*>(slot_T.data_ptr());
  for (int64_t t = 0; t < row_T.size(0); ++t) {
    int64_t position = positions[t];
    int64_t page = row<int32_t>(page_table_RP, rows[t])[position / page_size];
    tokens[t] = row<int32_t>(token_pool_RL, rows[t])[position];
    slots[t] = page * page_size + position % page_size;
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_rms_norm, add_rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotate_and_store, rotate_and_store);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(causal_softmax, causal_softmax);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(mask_logits, mask_logits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scatter, scatter);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(look_up, look_up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take_rows, take_rows);
