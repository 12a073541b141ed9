// A tile of PagedAttention: which spans its rows see, partition by partition.
// No std here: see quant_linear_kernel.h.
#pragma once

#include "paged_attention_span.h"

namespace stepwell {
namespace {

template <class V>
struct Attention {
  using F32 = typename V::F32;

  static void clear(int64_t rows, int64_t dim, float* records) {
    const int64_t stride = record_floats(dim);
    std::memset(records, 0, static_cast<size_t>(rows * stride) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) records[r * stride] = -__builtin_inff();
  }

  // Adds one partition to a row's total. A partition of which the row saw nothing changes no bit.
  static void fold_row(int64_t dim, const float* part, float* total) {
    if (part[1] == 0.0f) return;
    const float top = total[0] > part[0] ? total[0] : part[0];
    alignas(64) float shift[16] = {total[0] - top, part[0] - top};
    V::store_f32(shift, Span<V>::exponential(V::load_f32(shift)));
    total[0] = top;
    total[1] = total[1] * shift[0] + part[1] * shift[1];
    const F32 keep = V::set_f32(shift[0]), take = V::set_f32(shift[1]);
    for (int64_t d = kRecordHead; d < record_floats(dim); d += 16)
      V::store_f32(total + d, V::fma(V::load_f32(part + d), take, V::multiply(V::load_f32(total + d), keep)));
  }

  static float* output_row(const AttentionShape& shape, const AttentionTile& tile, int64_t row) {
    return tile.out + ((tile.first + row / tile.heads) * shape.heads + tile.head + row % tile.heads) * shape.head_dim;
  }

  // total / sum; a row that saw no key gives zeros.
  static void finish_row(int64_t dim, float* total, float* out) {
    const F32 inverse = V::set_f32(total[1] == 0.0f ? 0.0f : 1.0f / total[1]);
    for (int64_t d = kRecordHead; d < record_floats(dim); d += 16) V::store_f32(total + d, V::multiply(V::load_f32(total + d), inverse));
    std::memcpy(out, total + kRecordHead, static_cast<size_t>(dim) * sizeof(float));
  }

  static void fold(const AttentionShape& shape, const AttentionTile& tile, const float* records, int64_t partitions) {
    const int64_t stride = record_floats(shape.head_dim), rows = tile.rows();
    alignas(64) float total[kRecordHead + kMostHeadDim];
    for (int64_t r = 0; r < rows; ++r) {
      clear(1, shape.head_dim, total);
      for (int64_t p = 0; p < partitions; ++p) fold_row(shape.head_dim, records + (p * rows + r) * stride, total);
      finish_row(shape.head_dim, total, output_row(shape, tile, r));
    }
  }

  // What a tile keeps while it walks its partitions.
  struct Walk {
    const AttentionShape& shape;
    const KvPool& pool;
    const AttentionTile& tile;
    int64_t positions[kTileRows];  // of each token: how many keys it would see without a window, less one
    alignas(64) float queries[kTileRows * kMostHeadDim];
    Span<V> span;

    Walk(const AttentionShape& s, const KvPool& p, const AttentionTile& t) : shape(s), pool(p), tile(t) {
      for (int64_t i = 0; i < tile.tokens; ++i) {
        positions[i] = tile.past + tile.first + i;
        if (tile.tree_mask != nullptr) positions[i] = tile.past + ancestors(i, 0, 0, nullptr) - 1;
        std::memcpy(queries + i * tile.heads * shape.head_dim, tile.queries + ((tile.first + i) * shape.heads + tile.head) * shape.head_dim,
                    static_cast<size_t>(tile.heads * shape.head_dim) * sizeof(float));
      }
    }

    // Counts the new tokens that the mask shows to token i, itself usually the last; those ranked [from, to) go to `list`.
    int64_t ancestors(int64_t i, int64_t from, int64_t to, int32_t* list) const {
      const uint8_t* mask = tile.tree_mask + (tile.first + i) * tile.tree_width;
      int64_t rank = 0;
      for (int64_t j = 0; j < tile.new_tokens; ++j) {
        if (mask[j] == 0) continue;
        if (rank >= from && rank < to) list[rank - from] = static_cast<int32_t>(j);
        ++rank;
      }
      return rank;
    }

    KeySet seen(int64_t i, int64_t start) const {
      const int64_t position = positions[i];
      const KeySet causal = first_keys(position + 1 - start);
      if (shape.window == 0) return causal;
      return causal & (~first_keys(position + 1 - shape.window - start) | first_keys(shape.sinks - start));
    }

    int64_t pool_row(int64_t key) const {
      const int64_t slot = tile.block_table[key / shape.block_size] * shape.block_size + key % shape.block_size;
      return KvRows<V>::row_of(shape, slot, tile.kv_head);
    }

    // Keys [start, start + 32) at their own positions, for all tokens of the tile.
    void shared_span(int64_t start, float* records) {
      KeySet sets[kTileRows], needed = 0;
      for (int64_t i = 0; i < tile.tokens; ++i) needed |= sets[i] = seen(i, start);
      if (needed == 0) return;
      int64_t rows[kSpan];
      for (KeySet rest = needed; rest != 0; rest &= rest - 1) rows[__builtin_ctz(rest)] = pool_row(start + __builtin_ctz(rest));
      span.load(shape, pool, rows, needed);
      for (int64_t i = 0, next; i < tile.tokens; i = next) {
        next = i + 1;
        while (next < tile.tokens && sets[next] == sets[i]) ++next;
        if (sets[i] != 0) attend(i, next - i, sets[i], records);
      }
    }

    // Under a tree mask, for one token: its ancestors follow the past as if they were its whole sequence, so that its bits are
    // those of plain decoding along that branch.
    void branch_span(int64_t i, int64_t start, float* records) {
      const KeySet needed = seen(i, start);
      if (needed == 0) return;
      int32_t branch[kSpan] = {};
      const int64_t skipped = start > tile.past ? start - tile.past : 0;  // ancestors in earlier spans
      ancestors(i, skipped, start + kSpan - tile.past, branch);
      int64_t rows[kSpan];
      for (KeySet rest = needed; rest != 0; rest &= rest - 1) {
        const int64_t j = __builtin_ctz(rest), key = start + j;
        rows[j] = pool_row(key < tile.past ? key : tile.past + branch[key - tile.past - skipped]);
      }
      span.load(shape, pool, rows, needed);
      attend(i, 1, needed, records);
    }

    void attend(int64_t token, int64_t tokens, KeySet set, float* records) {
      const int64_t row = token * tile.heads;
      span.attend(tokens * tile.heads, set, queries + row * shape.head_dim, records + row * record_floats(shape.head_dim));
    }

    void partition(int64_t index, float* records) {
      clear(tile.rows(), shape.head_dim, records);
      const int64_t start = index * kPartition, full = start + kPartition, keys = tile.keys(), end = full < keys ? full : keys;
      // Before every row's window: a tree's tokens stand at past - 1 or later, others at past + first or later.
      const int64_t earliest = tile.past + (tile.tree_mask != nullptr ? -1 : tile.first);
      if (shape.window != 0 && start >= shape.sinks && full <= earliest + 1 - shape.window) return;
      const int64_t whole_past = tile.past / kSpan * kSpan;
      const int64_t shared = tile.tree_mask != nullptr && whole_past < end ? whole_past : end;
      for (int64_t key = start; key < shared; key += kSpan) shared_span(key, records);
      if (tile.tree_mask == nullptr) return;
      for (int64_t i = 0; i < tile.tokens; ++i)
        for (int64_t key = start > whole_past ? start : whole_past; key < end; key += kSpan) branch_span(i, key, records);
    }
  };

  static void attend_partition(const AttentionShape& shape, const KvPool& pool, const AttentionTile& tile, int64_t partition,
                               float* records) {
    Walk walk(shape, pool, tile);
    walk.partition(partition, records);
  }

  static void attend(const AttentionShape& shape, const KvPool& pool, const AttentionTile& tile) {
    const int64_t dim = shape.head_dim, stride = record_floats(dim), rows = tile.rows();
    alignas(64) float part[kTileRows * (kRecordHead + kMostHeadDim)], total[kTileRows * (kRecordHead + kMostHeadDim)];
    Walk walk(shape, pool, tile);
    clear(rows, dim, total);
    for (int64_t p = 0; p < tile.partitions(); ++p) {
      walk.partition(p, part);
      for (int64_t r = 0; r < rows; ++r) fold_row(dim, part + r * stride, total + r * stride);
    }
    for (int64_t r = 0; r < rows; ++r) finish_row(dim, total + r * stride, output_row(shape, tile, r));
  }
};

template <class V>
constexpr AttentionKernels attention_of() {
  return {KvRows<V>::write, Attention<V>::attend, Attention<V>::attend_partition, Attention<V>::fold};
}

}  // namespace
}  // namespace stepwell
