// RoPE, K/V write and attention over pages in one op; FORMAT.md states the contract.
//
// Every query row does its own arithmetic in one order: spans of 32 keys aligned to absolute position 0, an online
// softmax over the spans, keys ascending within one. A row's bits therefore depend on its query and the K/V it reads, and
// not on how the step was cut. What rows share is the conversion of a span to float32: the G query heads of a K/V head
// and up to `kTileTokens` tokens use it while it lies in L1/L2. Limit at decode: the bytes of K and V.
#pragma once

#include <cstdint>

#include "isa.h"

namespace stepwell {

constexpr int64_t kSpan = 32;
constexpr int64_t kTileTokens = 8;
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
  float* key_scales;     // int8 only
  float* value_scales;
};

// Writes token's K/V at `slot` (-1: nowhere) and its rotated, scaled queries to `queries` [heads, head_dim].
// `qkv` is the token's row, `rope` its cos and sin [head_dim]; the norms may be null.
using WriteToken = void (*)(const AttentionShape& shape, const KvPool& pool, const float* qkv, const float* rope, const float* q_norm,
                            const float* k_norm, int64_t slot, float* queries);

// One sequence, one K/V head, new tokens [first, first + count), count <= kTileTokens.
struct AttentionTile {
  const int32_t* block_table;
  int64_t past;              // tokens before the first new one of the sequence
  int64_t first, count;      // new tokens, counted within the sequence
  int64_t kv_head;
  const float* queries;      // of the sequence's first new token: [tokens, heads, head_dim]
  float* out;                // likewise
  const uint8_t* tree_mask;  // row of the sequence's first new token, or null
  int64_t tree_width;
  int64_t new_tokens;        // of the sequence
};

using AttendTile = void (*)(const AttentionShape& shape, const KvPool& pool, const AttentionTile& tile);

struct AttentionKernels {
  WriteToken write;
  AttendTile attend;
};

extern const AttentionKernels kAttentionPortable;
extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;

bool head_dim_supported(int64_t head_dim);

}  // namespace stepwell
