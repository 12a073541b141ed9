// PagedAttention: every check, then the two parallel passes.
#include "paged_attention.h"

#include <algorithm>
#include <array>
#include <vector>

#include "library.h"
#include "op.h"
#include "scratch.h"

namespace stepwell {
namespace {

using Long = long long;

const AttentionKernels& attention_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return kAttentionAvx2;
  if (isa != Isa::kPortable) return kAttentionAvx512;
#endif
  (void)isa;
  return kAttentionPortable;
}

class PagedAttention {
 public:
  static constexpr const char* kName = "PagedAttention";

  explicit PagedAttention(const Attributes& attributes) : kernels_(&attention_kernels(choose_isa())) {
    shape_.heads = attributes.integer("heads");
    shape_.kv_heads = attributes.integer("kv_heads");
    shape_.head_dim = attributes.integer("head_dim");
    shape_.scale = attributes.real("scale");
    shape_.epsilon = attributes.real("epsilon");
    shape_.interleaved = attributes.integer("rope_interleaved") != 0;
    shape_.window = attributes.integer("window");
    shape_.sinks = attributes.integer("sinks");
    if (shape_.kv_heads < 1 || shape_.heads < shape_.kv_heads || shape_.heads > 4096 || shape_.heads % shape_.kv_heads != 0)
      fail("PagedAttention: %lld heads over %lld kv_heads; heads must be a multiple of kv_heads", Long{shape_.heads}, Long{shape_.kv_heads});
    if (!head_dim_supported(shape_.head_dim))
      fail("PagedAttention: head_dim %lld, expected a multiple of 16 up to 128, or 256", Long{shape_.head_dim});
    if (shape_.window < 0 || shape_.sinks < 0) fail("PagedAttention: window %lld and sinks %lld must not be negative", Long{shape_.window}, Long{shape_.sinks});
  }

  void compute(const Context& context) const {
    const int64_t dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
    const Tensor qkv = context.input(0, "qkv", Dtype::kFloat);
    check_shape(context, qkv, std::array<int64_t, 2>{-1, (heads + 2 * kv_heads) * dim});
    const int64_t tokens = qkv.shape[0];
    const Tensor rope = context.input(1, "rope", Dtype::kFloat);
    check_shape(context, rope, std::array<int64_t, 2>{tokens, dim});
    const Tensor slots = context.input(2, "slot_mapping", Dtype::kInt32);
    check_shape(context, slots, std::array<int64_t, 1>{tokens});
    const Tensor past = context.input(4, "past_lens", Dtype::kInt32);
    check_shape(context, past, std::array<int64_t, 1>{-1});
    const int64_t sequences = past.shape[0];
    const Tensor starts = context.input(3, "cu_seqlens", Dtype::kInt32);
    check_shape(context, starts, std::array<int64_t, 1>{sequences + 1});
    const Tensor table = context.input(5, "block_table", Dtype::kInt32);
    check_shape(context, table, std::array<int64_t, 2>{sequences, -1});

    AttentionShape shape = shape_;
    const Tensor keys = context.input(6, "key_cache");
    check_shape(context, keys, std::array<int64_t, 4>{-1, -1, kv_heads, dim});
    switch (keys.dtype) {
      case Dtype::kFloat16: shape.dtype = KvDtype::kFloat16; break;
      case Dtype::kBfloat16: shape.dtype = KvDtype::kBfloat16; break;
      case Dtype::kInt8: shape.dtype = KvDtype::kInt8; break;
      default: fail("PagedAttention: input key_cache is %s, expected float16, bfloat16 or int8", dtype_name(keys.dtype));
    }
    const Tensor values = context.input(7, "value_cache", keys.dtype);
    check_shape(context, values, keys.shape);
    const int64_t blocks = keys.shape[0];
    shape.block_size = keys.shape[1];
    if (shape.block_size < 1) fail("PagedAttention: input key_cache has block_size 0");
    KvPool pool{keys.as<uint8_t>(), values.as<uint8_t>(), nullptr, nullptr};
    if (shape.dtype == KvDtype::kInt8) {
      const std::array<int64_t, 3> expected{blocks, shape.block_size, kv_heads};
      const Tensor key_scale = context.input(8, "key_scale", Dtype::kFloat);
      check_shape(context, key_scale, expected);
      const Tensor value_scale = context.input(9, "value_scale", Dtype::kFloat);
      check_shape(context, value_scale, expected);
      pool.key_scales = key_scale.as<float>();
      pool.value_scales = value_scale.as<float>();
    }
    const float* q_norm = norm(context, 10, "q_norm");
    const float* k_norm = norm(context, 11, "k_norm");

    const std::vector<Span> spans = check_sequences(starts, past, table, slots, tokens, blocks, shape.block_size);
    const uint8_t* tree = nullptr;
    int64_t tree_width = 0;
    if (context.has_input(12)) {
      const Tensor mask = context.input(12, "tree_mask", Dtype::kUint8);
      check_shape(context, mask, std::array<int64_t, 2>{tokens, -1});
      tree = mask.as<uint8_t>();
      tree_width = mask.shape[1];
    }

    float* out = context.output<float>(0, std::array<int64_t, 2>{tokens, heads * dim});
    if (tokens == 0) return;
    Scratch<float> queries(tokens * heads * dim);
    constexpr int64_t kTokensAtOnce = 8;
    context.parallel(static_cast<size_t>((tokens + kTokensAtOnce - 1) / kTokensAtOnce), [&](size_t run) {
      const int64_t from = static_cast<int64_t>(run) * kTokensAtOnce, to = std::min(tokens, from + kTokensAtOnce);
      for (int64_t t = from; t < to; ++t)
        kernels_->write(shape, pool, qkv.as<float>() + t * qkv.shape[1], rope.as<float>() + t * dim, q_norm, k_norm, slots.as<int32_t>()[t],
                        queries.data + t * heads * dim);
    });

    std::vector<AttentionTile> tiles;
    for (const Span& span : spans) {
      if (tree != nullptr && tree_width < span.count)
        fail("PagedAttention: input tree_mask has %lld columns, a sequence has %lld new tokens", Long{tree_width}, Long{span.count});
      for (int64_t first = 0; first < span.count; first += kTileTokens)
        for (int64_t head = 0; head < kv_heads; ++head)
          tiles.push_back({table.as<int32_t>() + span.row * table.shape[1], span.past, first, std::min(kTileTokens, span.count - first), head,
                           queries.data + span.start * heads * dim, out + span.start * heads * dim,
                           tree == nullptr ? nullptr : tree + span.start * tree_width, tree_width, span.count});
    }
    context.parallel(tiles.size(), [&](size_t i) { kernels_->attend(shape, pool, tiles[i]); });
  }

 private:
  struct Span {
    int64_t row, start, count, past;
  };

  const float* norm(const Context& context, size_t index, const char* name) const {
    if (!context.has_input(index)) return nullptr;
    const Tensor tensor = context.input(index, name, Dtype::kFloat);
    check_shape(context, tensor, std::array<int64_t, 1>{shape_.head_dim});
    return tensor.as<float>();
  }

  // Every index that the kernels will follow, checked; returns the sequences that have new tokens.
  static std::vector<Span> check_sequences(const Tensor& starts, const Tensor& past, const Tensor& table, const Tensor& slots,
                                           int64_t tokens, int64_t blocks, int64_t block_size) {
    const int32_t* start = starts.as<int32_t>();
    const int64_t sequences = past.shape[0], width = table.shape[1];
    if (start[0] != 0) fail("PagedAttention: cu_seqlens[0] = %d, expected 0", start[0]);
    if (start[sequences] != tokens) fail("PagedAttention: cu_seqlens[%lld] = %d, expected the %lld tokens of qkv", Long{sequences}, start[sequences], Long{tokens});
    for (int64_t t = 0; t < tokens; ++t)
      if (const int32_t slot = slots.as<int32_t>()[t]; slot < -1 || slot >= blocks * block_size)
        fail("PagedAttention: slot_mapping[%lld] = %d, expected -1 to %lld", Long{t}, slot, Long{blocks * block_size - 1});
    std::vector<Span> spans;
    for (int64_t b = 0; b < sequences; ++b) {
      if (start[b + 1] < start[b]) fail("PagedAttention: cu_seqlens[%lld] = %d is below cu_seqlens[%lld] = %d", Long{b + 1}, start[b + 1], Long{b}, start[b]);
      const int64_t before = past.as<int32_t>()[b], count = start[b + 1] - start[b];
      if (before < 0) fail("PagedAttention: past_lens[%lld] = %lld, expected 0 or more", Long{b}, Long{before});
      if (count == 0) continue;
      const int64_t needed = (before + count + block_size - 1) / block_size;
      if (needed > width)
        fail("PagedAttention: sequence %lld needs %lld blocks for %lld tokens, block_table has %lld columns", Long{b}, Long{needed}, Long{before + count}, Long{width});
      for (int64_t i = 0; i < needed; ++i)
        if (const int32_t block = table.as<int32_t>()[b * width + i]; block < 0 || block >= blocks)
          fail("PagedAttention: block_table[%lld][%lld] = %d, expected 0 to %lld", Long{b}, Long{i}, block, Long{blocks - 1});
      spans.push_back({b, start[b], count, before});
    }
    return spans;
  }

  const AttentionKernels* kernels_;
  AttentionShape shape_{};
};

const Signature kPagedAttention{PagedAttention::kName, {1, 1, 6, 6, 6, 6, 0, 0, 1, 1, 1, 1, 2}, 8, {1}, 1};

}  // namespace

bool head_dim_supported(int64_t head_dim) { return head_dim == 256 || (head_dim >= 16 && head_dim <= 128 && head_dim % 16 == 0); }

void register_paged_attention(Registry& registry) {
  static Op<PagedAttention> op(&kPagedAttention);
  registry.add(&op);
}

}  // namespace stepwell
