#include "paged_attention_inputs.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace stepwell {
namespace {

using Long = long long;

const float* read_norm(const Context& context, size_t index, const char* name, int64_t head_dim) {
  if (!context.has_input(index)) return nullptr;
  const Tensor tensor = context.input(index, name, Dtype::kFloat);
  check_shape(context, tensor, std::array<int64_t, 1>{head_dim});
  return tensor.as<float>();
}

KvDtype kv_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return KvDtype::kFloat16;
    case Dtype::kBfloat16:
      return KvDtype::kBfloat16;
    case Dtype::kInt8:
      return KvDtype::kInt8;
    default:
      fail("PagedAttention: input key_cache is %s, expected float16, bfloat16 or int8", dtype_name(dtype));
  }
}

void read_pool(const Context& context, AttentionInputs& in, int64_t& blocks) {
  AttentionShape& shape = in.shape;
  const Tensor keys = context.input(6, "key_cache");
  shape.dtype = kv_dtype(keys.dtype);
  check_shape(context, keys, std::array<int64_t, 4>{-1, -1, shape.kv_heads, shape.head_dim});
  const Tensor values = context.input(7, "value_cache", keys.dtype);
  check_shape(context, values, keys.shape);
  blocks = keys.shape[0];
  shape.block_size = keys.shape[1];
  if (shape.block_size < 1) fail("PagedAttention: input key_cache has block_size %lld, expected 1 or more", Long{shape.block_size});
  in.pool = {keys.as<uint8_t>(), values.as<uint8_t>(), nullptr, nullptr};
  if (shape.dtype != KvDtype::kInt8) return;
  const std::array<int64_t, 3> expected{blocks, shape.block_size, shape.kv_heads};
  const Tensor key_scale = context.input(8, "key_scale", Dtype::kFloat);
  check_shape(context, key_scale, expected);
  const Tensor value_scale = context.input(9, "value_scale", Dtype::kFloat);
  check_shape(context, value_scale, expected);
  in.pool.key_scales = key_scale.as<float>();
  in.pool.value_scales = value_scale.as<float>();
}

void check_slots(const Tensor& slots, int64_t bound) {
  for (int64_t t = 0; t < slots.count; ++t)
    if (const int32_t slot = slots.as<int32_t>()[t]; slot < -1 || slot >= bound)
      fail("PagedAttention: slot_mapping[%lld] = %d, expected -1 to %lld", Long{t}, slot, Long{bound - 1});
}

std::vector<AttentionSequence> read_sequences(const Tensor& starts, const Tensor& past, int64_t tokens) {
  const int32_t* start = starts.as<int32_t>();
  const int64_t count = past.count;
  if (start[0] != 0) fail("PagedAttention: cu_seqlens[0] = %d, expected 0", start[0]);
  std::vector<AttentionSequence> sequences;
  for (int64_t b = 0; b < count; ++b) {
    if (start[b + 1] < start[b])
      fail("PagedAttention: cu_seqlens[%lld] = %d, expected at least cu_seqlens[%lld] = %d", Long{b + 1}, start[b + 1], Long{b}, start[b]);
    if (start[b + 1] > tokens)
      fail("PagedAttention: cu_seqlens[%lld] = %d, expected at most the %lld tokens of qkv", Long{b + 1}, start[b + 1], Long{tokens});
    const int64_t before = past.as<int32_t>()[b];
    if (before < 0) fail("PagedAttention: past_lens[%lld] = %lld, expected 0 or more", Long{b}, Long{before});
    if (start[b + 1] > start[b]) sequences.push_back({b, start[b], start[b + 1] - start[b], before});
  }
  if (start[count] != tokens)
    fail("PagedAttention: cu_seqlens[%lld] = %d, expected the %lld tokens of qkv", Long{count}, start[count], Long{tokens});
  return sequences;
}

// Every block that holds a key of the sequence, its new tokens included.
void check_blocks(const AttentionSequence& sequence, const Tensor& table, int64_t blocks, int64_t block_size) {
  const int64_t keys = sequence.past + sequence.count, width = table.shape[1];
  const int64_t needed = (keys - 1) / block_size + 1;  // rounding up by adding could overflow
  if (needed > width)
    fail("PagedAttention: block_table has %lld columns, expected at least %lld for the %lld tokens of sequence %lld", Long{width},
         Long{needed}, Long{keys}, Long{sequence.row});
  for (int64_t i = 0; i < needed; ++i)
    if (const int32_t block = table.as<int32_t>()[sequence.row * width + i]; block < 0 || block >= blocks)
      fail("PagedAttention: block_table[%lld][%lld] = %d, expected 0 to %lld", Long{sequence.row}, Long{i}, block, Long{blocks - 1});
}

}  // namespace

AttentionShape read_attention_attributes(const Attributes& attributes) {
  AttentionShape shape{};
  shape.heads = attributes.integer("heads");
  shape.kv_heads = attributes.integer("kv_heads");
  shape.head_dim = attributes.integer("head_dim");
  shape.scale = attributes.real("scale");
  shape.epsilon = attributes.real("epsilon");
  const int64_t interleaved = attributes.integer("rope_interleaved");
  shape.window = attributes.integer("window");
  shape.sinks = attributes.integer("sinks");
  constexpr int64_t kMostHeads = 4096;
  if (shape.heads < 1 || shape.heads > kMostHeads)
    fail("PagedAttention: attribute heads = %lld, expected 1 to %lld", Long{shape.heads}, Long{kMostHeads});
  if (shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0)
    fail("PagedAttention: attribute kv_heads = %lld, expected a divisor of heads = %lld", Long{shape.kv_heads}, Long{shape.heads});
  if (shape.head_dim < 8 || shape.head_dim > kMostHeadDim || shape.head_dim % 8 != 0)
    fail("PagedAttention: attribute head_dim = %lld, expected a multiple of 8 up to %lld", Long{shape.head_dim}, Long{kMostHeadDim});
  if (!std::isfinite(shape.scale)) fail("PagedAttention: attribute scale = %g, expected a finite number", double{shape.scale});
  if (!std::isfinite(shape.epsilon) || shape.epsilon < 0)
    fail("PagedAttention: attribute epsilon = %g, expected a finite number, 0 or more", double{shape.epsilon});
  if (interleaved != 0 && interleaved != 1) fail("PagedAttention: attribute rope_interleaved = %lld, expected 0 or 1", Long{interleaved});
  if (shape.window < 0) fail("PagedAttention: attribute window = %lld, expected 0 or more", Long{shape.window});
  if (shape.sinks < 0) fail("PagedAttention: attribute sinks = %lld, expected 0 or more", Long{shape.sinks});
  // Beyond any position, so that adding one to them cannot overflow.
  constexpr int64_t kForever = int64_t{1} << 40;
  shape.window = std::min(shape.window, kForever);
  shape.sinks = std::min(shape.sinks, kForever);
  shape.interleaved = interleaved == 1;
  return shape;
}

AttentionInputs read_attention_inputs(const Context& context, const AttentionShape& attributes) {
  AttentionInputs in{};
  in.shape = attributes;
  const int64_t dim = attributes.head_dim;
  const Tensor qkv = context.input(0, "qkv", Dtype::kFloat);
  check_shape(context, qkv, std::array<int64_t, 2>{-1, (attributes.heads + 2 * attributes.kv_heads) * dim});
  in.tokens = qkv.shape[0];
  in.qkv_width = qkv.shape[1];
  in.qkv = qkv.as<float>();
  const Tensor rope = context.input(1, "rope", Dtype::kFloat);
  check_shape(context, rope, std::array<int64_t, 2>{in.tokens, dim});
  in.rope = rope.as<float>();
  const Tensor slots = context.input(2, "slot_mapping", Dtype::kInt32);
  check_shape(context, slots, std::array<int64_t, 1>{in.tokens});
  in.slots = slots.as<int32_t>();
  const Tensor past = context.input(4, "past_lens", Dtype::kInt32);
  check_shape(context, past, std::array<int64_t, 1>{-1});
  const Tensor starts = context.input(3, "cu_seqlens", Dtype::kInt32);
  check_shape(context, starts, std::array<int64_t, 1>{past.count + 1});
  const Tensor table = context.input(5, "block_table", Dtype::kInt32);
  check_shape(context, table, std::array<int64_t, 2>{past.count, -1});
  in.block_table = table.as<int32_t>();
  in.table_width = table.shape[1];
  int64_t blocks = 0;
  read_pool(context, in, blocks);
  in.q_norm = read_norm(context, 10, "q_norm", dim);
  in.k_norm = read_norm(context, 11, "k_norm", dim);

  check_slots(slots, blocks * in.shape.block_size);
  in.sequences = read_sequences(starts, past, in.tokens);
  for (const AttentionSequence& sequence : in.sequences) check_blocks(sequence, table, blocks, in.shape.block_size);

  if (!context.has_input(12)) return in;
  const Tensor mask = context.input(12, "tree_mask", Dtype::kUint8);
  check_shape(context, mask, std::array<int64_t, 2>{in.tokens, -1});
  in.tree_mask = mask.as<uint8_t>();
  in.tree_width = mask.shape[1];
  for (const AttentionSequence& sequence : in.sequences)
    if (sequence.count > in.tree_width)
      fail("PagedAttention: tree_mask has %lld columns, expected at least the %lld new tokens of sequence %lld", Long{in.tree_width},
           Long{sequence.count}, Long{sequence.row});
  return in;
}

}  // namespace stepwell
