// The inputs of one PagedAttention call after every check of FORMAT.md: no index that a kernel follows is out of bounds.
#pragma once

#include <cstdint>
#include <vector>

#include "op.h"
#include "paged_attention.h"

namespace stepwell {

// New tokens [start, start + count) of the step, count > 0, belonging to row `row` of the block table.
struct AttentionSequence {
  int64_t row, start, count, past;
};

struct AttentionInputs {
  AttentionShape shape;  // the attributes, with the caches' dtype and block size
  KvPool pool;
  int64_t tokens;
  const float* qkv;
  int64_t qkv_width;
  const float* rope;
  const int32_t* slots;
  const int32_t* block_table;
  int64_t table_width;
  const float* q_norm;  // null: none
  const float* k_norm;
  const uint8_t* tree_mask;
  int64_t tree_width;
  std::vector<AttentionSequence> sequences;
};

// Both fail (OpError) naming the op, the input or attribute, the index, the value and the bound; neither writes anything.
AttentionShape read_attention_attributes(const Attributes& attributes);
AttentionInputs read_attention_inputs(const Context& context, const AttentionShape& attributes);

}  // namespace stepwell
