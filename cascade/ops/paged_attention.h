// RoPE, K/V write and attention over pages in one op; FORMAT.md states the contract.
//
// Every query row does its own arithmetic in one order: partitions of 512 keys aligned to absolute position 0, folded in
// order; in a partition, spans of 32 keys with an online softmax; in a span, keys ascending. A row's bits therefore
// depend on its query and the K/V it reads, and not on how the step was cut into tiles, tasks or chunks. What rows share
// is the conversion of a span to float32 (K transposed): up to `kTileRows` rows use it while it lies in L1.
// Limits aimed at: bytes of K and V at decode; at prefill one FMA a cycle and port, 2 * head_dim of them a row and key.
#pragma once

#include <cstdint>

#include "isa.h"

namespace stepwell {

constexpr int64_t kSpan = 32;
constexpr int64_t kPartition = 512;
constexpr int64_t kTileRows = 64;
constexpr int64_t kMostHeadDim = 256;

enum class KvDtype : int { kFloat16, kBfloat16, kInt8 };

struct AttentionShape {
  int64_t heads, kv_heads, head_dim, block_size;
  KvDtype dtype;
  float scale, epsilon;
  bool interleaved;
  int64_t window, sinks;
};

struct KvPool {
  uint8_t* keys;
  uint8_t* values;
  float* key_scales;  // int8 only
  float* value_scales;
};

// Writes a token's K/V at `slot` (-1: nowhere) and its rotated, scaled queries to `queries` [heads, head_dim].
// `qkv` is the token's row, `rope` its cos and sin [head_dim]; the norms may be null.
using WriteToken = void (*)(const AttentionShape& shape, const KvPool& pool, const float* qkv, const float* rope, const float* q_norm,
                            const float* k_norm, int64_t slot, float* queries);

// Rows of one sequence that share the keys of one K/V head: new tokens [first, first + tokens) times query heads
// [head, head + heads), at most kTileRows of them, token-major.
struct AttentionTile {
  const int32_t* block_table;
  int64_t past;        // tokens before the first new one of the sequence
  int64_t new_tokens;  // of the sequence
  int64_t first, tokens;
  int64_t kv_head, head, heads;
  const float* queries;      // of the sequence's first new token: [new_tokens, all heads, head_dim]
  float* out;                // likewise
  const uint8_t* tree_mask;  // row of the sequence's first new token, or null
  int64_t tree_width;

  int64_t rows() const { return tokens * heads; }
  // Keys that the tile's rows may see: [0, keys()).
  int64_t keys() const { return past + (tree_mask != nullptr ? new_tokens : first + tokens); }
  int64_t partitions() const { return (keys() + kPartition - 1) / kPartition; }
};

// Floats of one row's state: maximum, sum, then the accumulator from element 16, padded to whole vectors.
constexpr int64_t kRecordHead = 16;
constexpr int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr int64_t record_floats(int64_t head_dim) { return kRecordHead + padded(head_dim); }

// The whole tile, to its output.
using AttendTile = void (*)(const AttentionShape& shape, const KvPool& pool, const AttentionTile& tile);
// One partition of the tile, to `records` [rows].
using AttendPartition = void (*)(const AttentionShape& shape, const KvPool& pool, const AttentionTile& tile, int64_t partition,
                                 float* records);
// Folds `records` [partitions, rows] in order, to the tile's output: the bits of AttendTile.
using FoldTile = void (*)(const AttentionShape& shape, const AttentionTile& tile, const float* records, int64_t partitions);

struct AttentionKernels {
  WriteToken write;
  AttendTile attend;
  AttendPartition attend_partition;
  FoldTile fold;
};

extern const AttentionKernels kAttentionPortable;
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;

}  // namespace stepwell
