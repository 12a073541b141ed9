// One span of 32 keys against a run of query rows that see the same keys of it.
//
// The span as float32: K transposed [head_dim][32], V [32][head_dim padded to 16]; at head_dim 128 16 KiB each. A score is
// one chain of fma over d ascending in its own lane, so no sum across lanes is needed and R rows x 2 vectors of keys
// are independent chains. Beyond what the linear kernels need, V gives `transpose` (16 x 16), `most` (largest lane),
// `kBlockRows` and `kAccumulators` (rows and vectors that its registers hold).
// No std here: see quant_linear_kernel.h.
#pragma once

#include "paged_attention_write.h"

namespace stepwell {
namespace {

// Which of a span's 32 keys a row sees.
using KeySet = uint32_t;

inline KeySet first_keys(int64_t count) { return count <= 0 ? 0u : count >= kSpan ? ~0u : (1u << count) - 1u; }

template <class V>
struct Span {
  using F32 = typename V::F32;
  using Pool = KvRows<V>;

  int64_t dim;
  alignas(64) float keys[kMostHeadDim * kSpan];
  alignas(64) float values[kSpan * kMostHeadDim];
  alignas(64) float scores[kTileRows * kSpan];  // then the softmax's weights
  float keep[kTileRows];                        // what a row's sum and accumulator are multiplied by

  // rows[j] is the pool row of key j; those not in `needed` are not read: zero scores, no values.
  void load(const AttentionShape& shape, const KvPool& pool, const int64_t* rows, KeySet needed) {
    dim = shape.head_dim;
    switch (shape.dtype) {
      case KvDtype::kFloat16:
        return load_as<KvDtype::kFloat16>(pool, rows, needed);
      case KvDtype::kBfloat16:
        return load_as<KvDtype::kBfloat16>(pool, rows, needed);
      case KvDtype::kInt8:
        return load_as<KvDtype::kInt8>(pool, rows, needed);
    }
  }

  template <KvDtype kDtype>
  void load_as(const KvPool& pool, const int64_t* rows, KeySet needed) {
    const int64_t row_bytes = dim * Pool::element_bytes(kDtype), stride = padded(dim);
    for (int64_t j = 0; j < kSpan; j += 16) {
      for (int64_t d = 0; d < dim; d += 16) {
        F32 block[16];
        for (int i = 0; i < 16; ++i) {
          block[i] = V::zero_f32();
          if ((needed >> (j + i) & 1u) == 0) continue;
          block[i] = Pool::template load<kDtype>(pool.keys + rows[j + i] * row_bytes, d, dim);
          if constexpr (kDtype == KvDtype::kInt8) block[i] = V::multiply(block[i], V::set_f32(pool.key_scales[rows[j + i]]));
        }
        V::transpose(block);
        const int64_t count = dim - d < 16 ? dim - d : 16;
        for (int64_t i = 0; i < count; ++i) V::store_f32(keys + (d + i) * kSpan + j, block[i]);
      }
    }
    for (int64_t j = 0; j < kSpan; ++j) {
      if ((needed >> j & 1u) == 0) continue;
      const uint8_t* row = pool.values + rows[j] * row_bytes;
      for (int64_t d = 0; d < dim; d += 16) {
        F32 value = Pool::template load<kDtype>(row, d, dim);
        if constexpr (kDtype == KvDtype::kInt8) value = V::multiply(value, V::set_f32(pool.value_scales[rows[j]]));
        V::store_f32(values + j * stride + d, value);
      }
    }
  }

  // scores[r] = q[r] . keys for R rows whose queries are `q_stride` floats apart.
  template <int R>
  void score(const float* q, int64_t q_stride, float* to) const {
    constexpr int kColumns = R * 2 <= V::kAccumulators ? 2 : 1;  // vectors of 16 keys at a time
    for (int c = 0; c < 2; c += kColumns) {
      F32 acc[R][kColumns];
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < kColumns; ++i) acc[r][i] = V::zero_f32();
      const float* key = keys + 16 * c;
      for (int64_t d = 0; d < dim; ++d, key += kSpan) {
        F32 lanes[kColumns];
        for (int i = 0; i < kColumns; ++i) lanes[i] = V::load_f32(key + 16 * i);
        for (int r = 0; r < R; ++r) {
          const F32 one = V::set_f32(q[r * q_stride + d]);
          for (int i = 0; i < kColumns; ++i) acc[r][i] = V::fma(one, lanes[i], acc[r][i]);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < kColumns; ++i) V::store_f32(to + r * kSpan + 16 * (c + i), acc[r][i]);
    }
  }

  // exp(x) for x <= 0, e^-87 below -87, NaN for NaN: a maximum of its second operand passes NaN on, on every ISA.
  static F32 exponential(F32 x) {
    x = V::max(V::set_f32(-87.0f), x);
    const auto n = V::round(V::multiply(x, V::set_f32(1.44269504f)), -126.0f, 0.0f);
    const F32 whole = V::to_f32(n);
    F32 r = V::fma(whole, V::set_f32(-0.693359375f), x);
    r = V::fma(whole, V::set_f32(2.12194440e-4f), r);
    F32 p = V::set_f32(1.38888889e-3f);
    p = V::fma(p, r, V::set_f32(8.33333333e-3f));
    p = V::fma(p, r, V::set_f32(4.16666667e-2f));
    p = V::fma(p, r, V::set_f32(1.66666667e-1f));
    p = V::fma(p, r, V::set_f32(0.5f));
    p = V::fma(p, r, V::set_f32(1.0f));
    p = V::fma(p, r, V::set_f32(1.0f));
    return V::scale_by_power(p, n);
  }

  // Scores of `count` <= 16 rows to weights; updates the maximum and sum of their records.
  void soften(int64_t count, KeySet seen, float* rows, float* records, int64_t record_stride, float* keep_of) {
    alignas(64) float shift[16] = {};
    for (int64_t r = 0; r < count; ++r) {
      float* s = rows + r * kSpan;
      for (KeySet hidden = ~seen; hidden != 0; hidden &= hidden - 1) s[__builtin_ctz(hidden)] = -__builtin_inff();
      float& maximum = records[r * record_stride];
      const float most = V::most(V::max(V::load_f32(s), V::load_f32(s + 16)));
      const float top = maximum > most ? maximum : most;
      shift[r] = maximum - top;
      maximum = top;
    }
    V::store_f32(shift, exponential(V::load_f32(shift)));
    for (int64_t r = 0; r < count; ++r) {
      float* s = rows + r * kSpan;
      float* record = records + r * record_stride;
      const F32 top = V::set_f32(record[0]);
      V::store_f32(s, exponential(V::subtract(V::load_f32(s), top)));
      V::store_f32(s + 16, exponential(V::subtract(V::load_f32(s + 16), top)));
      for (KeySet hidden = ~seen; hidden != 0; hidden &= hidden - 1) s[__builtin_ctz(hidden)] = 0.0f;
      record[1] = record[1] * shift[r] + V::sum(V::add(V::load_f32(s), V::load_f32(s + 16)));
      keep_of[r] = shift[r];
    }
  }

  // acc = acc * keep + weights . values over the listed keys, for R rows and C vectors of the head.
  template <int R, int C>
  void weigh(const float* weights, const float* keep_of, const int* list, int listed, int64_t d, float* records,
             int64_t record_stride) const {
    const int64_t stride = padded(dim);
    F32 acc[R][C];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i)
        acc[r][i] = V::multiply(V::load_f32(records + r * record_stride + kRecordHead + d + 16 * i), V::set_f32(keep_of[r]));
    for (int n = 0; n < listed; ++n) {
      const float* value = values + list[n] * stride + d;
      F32 lanes[C];
      for (int i = 0; i < C; ++i) lanes[i] = V::load_f32(value + 16 * i);
      for (int r = 0; r < R; ++r) {
        const F32 weight = V::set_f32(weights[r * kSpan + list[n]]);
        for (int i = 0; i < C; ++i) acc[r][i] = V::fma(weight, lanes[i], acc[r][i]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) V::store_f32(records + r * record_stride + kRecordHead + d + 16 * i, acc[r][i]);
  }

  template <int R>
  void weigh_rows(const float* weights, const float* keep_of, const int* list, int listed, float* records, int64_t record_stride) const {
    constexpr int kFit = V::kAccumulators / R;
    constexpr int kWide = kFit >= 8 ? 8 : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
    const int64_t end = padded(dim);
    int64_t d = 0;
    for (; d + 16 * kWide <= end; d += 16 * kWide) weigh<R, kWide>(weights, keep_of, list, listed, d, records, record_stride);
    if constexpr (kWide > 1)
      for (; d < end; d += 16) weigh<R, 1>(weights, keep_of, list, listed, d, records, record_stride);
  }

  // Calls body.template operator()<R>(first) over blocks of at most kBlockRows of `count` rows.
  template <int R, typename Body>
  static void last_rows(int64_t first, int64_t count, const Body& body) {
    if constexpr (R > 0) {
      if (count == R) return body.template operator()<R>(first);
      last_rows<R - 1>(first, count, body);
    }
  }
  template <typename Body>
  static void blocks(int64_t count, const Body& body) {
    int64_t first = 0;
    for (; first + V::kBlockRows <= count; first += V::kBlockRows) body.template operator()<V::kBlockRows>(first);
    last_rows<V::kBlockRows - 1>(first, count - first, body);
  }

  // A run of `count` <= kTileRows rows that see the same keys: `queries` [count, head_dim], one record each.
  void attend(int64_t count, KeySet seen, const float* queries, float* records) {
    const int64_t stride = record_floats(dim);
    int list[kSpan];
    int listed = 0;
    for (KeySet rest = seen; rest != 0; rest &= rest - 1) list[listed++] = __builtin_ctz(rest);
    blocks(count, [&]<int R>(int64_t r) { score<R>(queries + r * dim, dim, scores + r * kSpan); });
    for (int64_t r = 0; r < count; r += 16)
      soften(count - r < 16 ? count - r : 16, seen, scores + r * kSpan, records + r * stride, stride, keep + r);
    blocks(count, [&]<int R>(int64_t r) { weigh_rows<R>(scores + r * kSpan, keep + r, list, listed, records + r * stride, stride); });
  }
};

}  // namespace
}  // namespace stepwell
