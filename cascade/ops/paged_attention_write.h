// Rows of the K/V pool: pass 1 of PagedAttention writes them, pass 2 reads them back.
// No std here: see quant_linear_kernel.h.
#pragma once

#include "paged_attention.h"
#include "quant_linear_kernel.h"

namespace stepwell {
namespace {

template <class V>
struct KvRows {
  using F32 = typename V::F32;

  static int64_t element_bytes(KvDtype dtype) { return dtype == KvDtype::kInt8 ? 1 : 2; }

  // Index of (slot, head) among the pool's rows of head_dim elements.
  static int64_t row_of(const AttentionShape& shape, int64_t slot, int64_t head) { return slot * shape.kv_heads + head; }

  template <KvDtype kDtype>
  static F32 convert(const uint8_t* p) {
    if constexpr (kDtype == KvDtype::kFloat16) return V::load_f16(p);
    if constexpr (kDtype == KvDtype::kBfloat16) return V::load_bf16(p);
    if constexpr (kDtype == KvDtype::kInt8) return V::to_f32(V::load_i8(p));
  }

  // Elements [d, d + 16) of a row as float32 before its scale; zeros past head_dim, where the pool may end.
  template <KvDtype kDtype>
  static F32 load(const uint8_t* row, int64_t d, int64_t head_dim) {
    constexpr int64_t kBytes = kDtype == KvDtype::kInt8 ? 1 : 2;
    if (d + 16 <= head_dim) return convert<kDtype>(row + d * kBytes);
    uint8_t tail[32] = {};
    std::memcpy(tail, row + d * kBytes, static_cast<size_t>((head_dim - d) * kBytes));
    return convert<kDtype>(tail);
  }

  // `x` has zeros from head_dim to the next multiple of 16.
  static void store(const AttentionShape& shape, uint8_t* pool, float* scales, int64_t row, const float* x) {
    const int64_t dim = shape.head_dim, bytes = element_bytes(shape.dtype);
    alignas(64) uint8_t converted[2 * kMostHeadDim];
    if (shape.dtype == KvDtype::kInt8) {
      Kernels<V>::quantize(x, dim, dim, 1, reinterpret_cast<int8_t*>(converted), scales + row);
    } else if (shape.dtype == KvDtype::kFloat16) {
      for (int64_t d = 0; d < dim; d += 16) V::store_f16(converted + 2 * d, V::load_f32(x + d));
    } else {
      for (int64_t d = 0; d < dim; d += 16) V::store_bf16(converted + 2 * d, V::load_f32(x + d));
    }
    std::memcpy(pool + row * dim * bytes, converted, static_cast<size_t>(dim * bytes));
  }

  static void pad(const float* x, int64_t dim, float* out) {
    std::memcpy(out, x, static_cast<size_t>(dim) * sizeof(float));
    for (int64_t d = dim; d < padded(dim); ++d) out[d] = 0.0f;
  }

  // Norm (optional) and RoPE of one head; `out` has room for whole vectors and gets zeros past head_dim.
  static void rotate(const AttentionShape& shape, const float* x, const float* rope, const float* norm, float* __restrict out) {
    const int64_t dim = shape.head_dim, half = dim / 2;
    alignas(64) float row[kMostHeadDim], weights[kMostHeadDim];
    pad(x, dim, row);
    if (norm != nullptr) {
      pad(norm, dim, weights);
      Kernels<V>::rms_norm(row, weights, dim, shape.epsilon, row);
    }
    const float* cosine = rope;
    const float* sine = rope + half;
    if (shape.interleaved) {
      for (int64_t i = 0; i < half; ++i) {
        const float a = row[2 * i], b = row[2 * i + 1];
        out[2 * i] = a * cosine[i] - b * sine[i];
        out[2 * i + 1] = b * cosine[i] + a * sine[i];
      }
    } else {
      for (int64_t i = 0; i < half; ++i) {
        const float a = row[i], b = row[i + half];
        out[i] = a * cosine[i] - b * sine[i];
        out[i + half] = b * cosine[i] + a * sine[i];
      }
    }
    for (int64_t d = dim; d < padded(dim); ++d) out[d] = 0.0f;
  }

  static void write(const AttentionShape& shape, const KvPool& pool, const float* qkv, const float* rope, const float* q_norm,
                    const float* k_norm, int64_t slot, float* queries) {
    const int64_t dim = shape.head_dim;
    alignas(64) float row[kMostHeadDim];
    for (int64_t h = 0; h < shape.heads; ++h) {
      rotate(shape, qkv + h * dim, rope, q_norm, row);
      for (int64_t d = 0; d < dim; ++d) queries[h * dim + d] = row[d] * shape.scale;
    }
    if (slot < 0) return;
    const float* k = qkv + shape.heads * dim;
    const float* v = k + shape.kv_heads * dim;
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      rotate(shape, k + h * dim, rope, k_norm, row);
      store(shape, pool.keys, pool.key_scales, row_of(shape, slot, h), row);
      pad(v + h * dim, dim, row);
      store(shape, pool.values, pool.value_scales, row_of(shape, slot, h), row);
    }
  }
};

}  // namespace
}  // namespace stepwell
