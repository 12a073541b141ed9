// The kernels of PagedAttention over a vector type V (see quant_linear_kernel.h for what V gives and why no std here).
#pragma once

#include "paged_attention.h"
#include "quant_linear_kernel.h"

namespace stepwell {
namespace {

template <class V>
struct Attention {
  using F32 = typename V::F32;
  using I32 = typename V::I32;

  static int64_t element_bytes(KvDtype dtype) { return dtype == KvDtype::kInt8 ? 1 : 2; }

  // Index of (slot, head) among the pool's rows of head_dim elements.
  static int64_t row_of(const AttentionShape& shape, int64_t slot, int64_t head) { return slot * shape.kv_heads + head; }

  static void load_row(const AttentionShape& shape, const uint8_t* pool, const float* scales, int64_t row, float* out) {
    const uint8_t* p = pool + row * shape.head_dim * element_bytes(shape.dtype);
    if (shape.dtype == KvDtype::kFloat16) {
      for (int64_t d = 0; d < shape.head_dim; d += 16) V::store_f32(out + d, V::load_f16(p + 2 * d));
    } else if (shape.dtype == KvDtype::kBfloat16) {
      for (int64_t d = 0; d < shape.head_dim; d += 16) V::store_f32(out + d, V::load_bf16(p + 2 * d));
    } else {
      const F32 scale = V::set_f32(scales[row]);
      for (int64_t d = 0; d < shape.head_dim; d += 16) V::store_f32(out + d, V::multiply(V::to_f32(V::load_i8(p + d)), scale));
    }
  }

  static void store_row(const AttentionShape& shape, uint8_t* pool, float* scales, int64_t row, const float* x) {
    uint8_t* p = pool + row * shape.head_dim * element_bytes(shape.dtype);
    if (shape.dtype == KvDtype::kFloat16) {
      for (int64_t d = 0; d < shape.head_dim; d += 16) V::store_f16(p + 2 * d, V::load_f32(x + d));
    } else if (shape.dtype == KvDtype::kBfloat16) {
      for (int64_t d = 0; d < shape.head_dim; d += 16) V::store_bf16(p + 2 * d, V::load_f32(x + d));
    } else {
      Kernels<V>::quantize(x, shape.head_dim, shape.head_dim, 1, reinterpret_cast<int8_t*>(p), scales + row);
    }
  }

  // Norm (optional) and RoPE of one head, out of place.
  static void rotate(const AttentionShape& shape, const float* x, const float* rope, const float* norm, float* out) {
    const int64_t dim = shape.head_dim, half = dim / 2;
    float normed[kMostHeadDim];
    if (norm != nullptr) {
      Kernels<V>::rms_norm(x, norm, dim, shape.epsilon, normed);
      x = normed;
    }
    const float* cosine = rope;
    const float* sine = rope + half;
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = shape.interleaved ? 2 * i : i, b = shape.interleaved ? 2 * i + 1 : i + half;
      const float xa = x[a], xb = x[b];
      out[a] = xa * cosine[i] - xb * sine[i];
      out[b] = xb * cosine[i] + xa * sine[i];
    }
  }

  static void write(const AttentionShape& shape, const KvPool& pool, const float* qkv, const float* rope, const float* q_norm,
                    const float* k_norm, int64_t slot, float* queries) {
    const int64_t dim = shape.head_dim;
    const F32 scale = V::set_f32(shape.scale);
    for (int64_t h = 0; h < shape.heads; ++h) {
      float* q = queries + h * dim;
      rotate(shape, qkv + h * dim, rope, q_norm, q);
      for (int64_t d = 0; d < dim; d += 16) V::store_f32(q + d, V::multiply(V::load_f32(q + d), scale));
    }
    if (slot < 0) return;
    const float* k = qkv + shape.heads * dim;
    const float* v = k + shape.kv_heads * dim;
    float rotated[kMostHeadDim];
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      rotate(shape, k + h * dim, rope, k_norm, rotated);
      store_row(shape, pool.keys, pool.key_scales, row_of(shape, slot, h), rotated);
      store_row(shape, pool.values, pool.value_scales, row_of(shape, slot, h), v + h * dim);
    }
  }

  static bool visible(const AttentionShape& shape, const AttentionTile& tile, int64_t token, int64_t key) {
    const int64_t position = tile.past + token;
    if (key >= tile.past && tile.tree_mask != nullptr) {
      const int64_t j = key - tile.past;
      return tile.tree_mask[token * tile.tree_width + j] != 0;
    }
    if (key > position) return false;
    return shape.window == 0 || key < shape.sinks || key > position - shape.window;
  }

  // One query against one span. `key_list` holds the offsets (0..31) of the keys that the row sees, ascending.
  template <int kVectors>
  static void attend_span(const float* q, const float* keys, const float* values, const int* key_list, int key_count, float* max, float* sum,
                          float* acc) {
    constexpr int kDim = kVectors * 16;
    alignas(64) float scores[kSpan];
    for (int64_t j = 0; j < kSpan; ++j) scores[j] = -3.0e38f;
    F32 query[kVectors];
    for (int i = 0; i < kVectors; ++i) query[i] = V::load_f32(q + 16 * i);
    float most = *max;
    for (int n = 0; n < key_count; ++n) {
      const float* key = keys + key_list[n] * kDim;
      F32 product = V::multiply(query[0], V::load_f32(key));
      for (int i = 1; i < kVectors; ++i) product = V::fma(query[i], V::load_f32(key + 16 * i), product);
      const float score = V::sum(product);
      scores[key_list[n]] = score;
      most = score > most ? score : most;
    }
    alignas(64) float raw[kSpan], weights[kSpan];
    const F32 top = V::set_f32(most);
    for (int64_t j = 0; j < kSpan; j += 16) {
      V::store_f32(raw + j, Kernels<V>::exponential(V::subtract(V::load_f32(scores + j), top)));
      V::store_f32(weights + j, V::zero_f32());
    }
    for (int n = 0; n < key_count; ++n) weights[key_list[n]] = raw[key_list[n]];
    const float total = V::sum(V::add(V::load_f32(weights), V::load_f32(weights + 16)));
    alignas(64) float shift[16];
    V::store_f32(shift, Kernels<V>::exponential(V::subtract(V::set_f32(*max), top)));
    const F32 keep = V::set_f32(shift[0]);
    *sum = *sum * shift[0] + total;
    *max = most;
    F32 row[kVectors];
    for (int i = 0; i < kVectors; ++i) row[i] = V::multiply(V::load_f32(acc + 16 * i), keep);
    for (int n = 0; n < key_count; ++n) {
      const float* value = values + key_list[n] * kDim;
      const F32 weight = V::set_f32(weights[key_list[n]]);
      for (int i = 0; i < kVectors; ++i) row[i] = V::fma(weight, V::load_f32(value + 16 * i), row[i]);
    }
    for (int i = 0; i < kVectors; ++i) V::store_f32(acc + 16 * i, row[i]);
  }

  template <int kVectors>
  static void attend_dim(const AttentionShape& shape, const KvPool& pool, const AttentionTile& tile) {
    constexpr int kDim = kVectors * 16;
    constexpr int64_t kHeadsAtOnce = 8;   // query heads of a group that share the converted span; more take another pass
    alignas(64) float keys[kSpan * kDim], values[kSpan * kDim];
    alignas(64) float acc[kTileTokens * kHeadsAtOnce * kDim];
    float max[kTileTokens * kHeadsAtOnce], sum[kTileTokens * kHeadsAtOnce];
    const int64_t per_group = shape.heads / shape.kv_heads;
    // A row sees keys up to its own position; with a tree mask, any new token of its sequence that the mask names.
    const int64_t last = tile.past + (tile.tree_mask != nullptr ? tile.new_tokens : tile.first + tile.count);
    for (int64_t base = 0; base < per_group; base += kHeadsAtOnce) {
      const int64_t group = per_group - base < kHeadsAtOnce ? per_group - base : kHeadsAtOnce;
      for (int64_t i = 0; i < tile.count * group; ++i) {
        max[i] = -3.0e38f;
        sum[i] = 0.0f;
      }
      std::memset(acc, 0, static_cast<size_t>(tile.count * group * kDim) * sizeof(float));
      for (int64_t span = 0; span < last; span += kSpan) {
        int lists[kTileTokens][kSpan];
        int counts[kTileTokens];
        bool needed[kSpan] = {};
        bool any = false;
        for (int64_t t = 0; t < tile.count; ++t) {
          counts[t] = 0;
          for (int j = 0; j < kSpan && span + j < last; ++j) {
            if (!visible(shape, tile, tile.first + t, span + j)) continue;
            lists[t][counts[t]++] = j;
            needed[j] = any = true;
          }
        }
        if (!any) continue;
        for (int j = 0; j < kSpan; ++j) {
          if (!needed[j]) continue;
          const int64_t position = span + j;
          const int64_t slot = tile.block_table[position / shape.block_size] * shape.block_size + position % shape.block_size;
          const int64_t row = row_of(shape, slot, tile.kv_head);
          load_row(shape, pool.keys, pool.key_scales, row, keys + j * kDim);
          load_row(shape, pool.values, pool.value_scales, row, values + j * kDim);
        }
        for (int64_t t = 0; t < tile.count; ++t) {
          if (counts[t] == 0) continue;
          for (int64_t h = 0; h < group; ++h) {
            const int64_t i = t * group + h;
            const int64_t head = tile.kv_head * per_group + base + h;
            const float* q = tile.queries + ((tile.first + t) * shape.heads + head) * kDim;
            attend_span<kVectors>(q, keys, values, lists[t], counts[t], &max[i], &sum[i], acc + i * kDim);
          }
        }
      }
      for (int64_t t = 0; t < tile.count; ++t) {
        for (int64_t h = 0; h < group; ++h) {
          const int64_t i = t * group + h;
          const int64_t head = tile.kv_head * per_group + base + h;
          float* out = tile.out + ((tile.first + t) * shape.heads + head) * kDim;
          const F32 inverse = V::set_f32(sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f);
          for (int d = 0; d < kDim; d += 16) V::store_f32(out + d, V::multiply(V::load_f32(acc + i * kDim + d), inverse));
        }
      }
    }
  }

  static void attend(const AttentionShape& shape, const KvPool& pool, const AttentionTile& tile) {
    switch (shape.head_dim) {
      case 16: return attend_dim<1>(shape, pool, tile);
      case 32: return attend_dim<2>(shape, pool, tile);
      case 48: return attend_dim<3>(shape, pool, tile);
      case 64: return attend_dim<4>(shape, pool, tile);
      case 80: return attend_dim<5>(shape, pool, tile);
      case 96: return attend_dim<6>(shape, pool, tile);
      case 112: return attend_dim<7>(shape, pool, tile);
      case 128: return attend_dim<8>(shape, pool, tile);
      case 256: return attend_dim<16>(shape, pool, tile);
    }
  }
};

template <class V>
constexpr AttentionKernels attention_of() {
  return {Attention<V>::write, Attention<V>::attend};
}

}  // namespace
}  // namespace stepwell
