// PagedAttention: the checks, then two passes (write K/V and rotate queries; attend), or three where few rows see many keys.
#include "paged_attention.h"

#include <algorithm>
#include <array>
#include <vector>

#include "library.h"
#include "op.h"
#include "paged_attention_inputs.h"
#include "scratch.h"

namespace stepwell {
namespace {

const AttentionKernels& attention_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return kAttentionAvx2;
  if (isa != Isa::kPortable) return kAttentionAvx512;
#endif
  (void)isa;
  return kAttentionPortable;
}

// Every tile of the step, those that cost most first, so that threads finish together.
std::vector<AttentionTile> cut_tiles(const AttentionInputs& in, const float* queries, float* out) {
  const AttentionShape& shape = in.shape;
  const int64_t group = shape.heads / shape.kv_heads, row_floats = shape.heads * shape.head_dim;
  std::vector<AttentionTile> tiles;
  for (const AttentionSequence& s : in.sequences) {
    for (int64_t h = 0; h < group; h += kTileRows) {
      const int64_t heads = std::min(kTileRows, group - h), most_tokens = std::max<int64_t>(1, kTileRows / heads);
      for (int64_t first = 0; first < s.count; first += most_tokens)
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head)
          tiles.push_back({.block_table = in.block_table + s.row * in.table_width,
                           .past = s.past,
                           .new_tokens = s.count,
                           .first = first,
                           .tokens = std::min(most_tokens, s.count - first),
                           .kv_head = kv_head,
                           .head = kv_head * group + h,
                           .heads = heads,
                           .queries = queries + s.start * row_floats,
                           .out = out + s.start * row_floats,
                           .tree_mask = in.tree_mask == nullptr ? nullptr : in.tree_mask + s.start * in.tree_width,
                           .tree_width = in.tree_width});
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const AttentionTile& a, const AttentionTile& b) { return a.rows() * a.keys() > b.rows() * b.keys(); });
  return tiles;
}

class PagedAttention {
 public:
  explicit PagedAttention(const Attributes& attributes)
      : kernels_(&attention_kernels(choose_isa())), attributes_(read_attention_attributes(attributes)) {}

  void compute(const Context& context) const {
    const AttentionInputs in = read_attention_inputs(context, attributes_);
    const int64_t row_floats = in.shape.heads * in.shape.head_dim;
    float* out = context.output<float>(0, std::array<int64_t, 2>{in.tokens, row_floats});
    if (in.tokens == 0) return;
    const Scratch<float> queries(in.tokens * row_floats);
    const std::vector<AttentionTile> tiles = cut_tiles(in, queries.data, out);
    write(context, in, queries.data);
    if (worth_splitting(tiles, in.shape.head_dim))
      attend_partitions(context, in, tiles);
    else
      context.parallel(tiles.size(), [&](size_t i) { kernels_->attend(in.shape, in.pool, tiles[i]); });
  }

 private:
  // Tokens of a task of pass 1: a decode step of few sequences wakes no other thread.
  static constexpr int64_t kTokensAtOnce = 8;
  // From so many tiles on, the tiles alone occupy the threads.
  static constexpr size_t kManyTiles = 32;
  static constexpr int64_t kMostRecordFloats = int64_t{1} << 22;  // 16 MiB

  void write(const Context& context, const AttentionInputs& in, float* queries) const {
    const int64_t row_floats = in.shape.heads * in.shape.head_dim;
    context.parallel(static_cast<size_t>((in.tokens + kTokensAtOnce - 1) / kTokensAtOnce), [&](size_t run) {
      const int64_t from = static_cast<int64_t>(run) * kTokensAtOnce, to = std::min(in.tokens, from + kTokensAtOnce);
      for (int64_t t = from; t < to; ++t)
        kernels_->write(in.shape, in.pool, in.qkv + t * in.qkv_width, in.rope + t * in.shape.head_dim, in.q_norm, in.k_norm, in.slots[t],
                        queries + t * row_floats);
    });
  }

  // Few tiles of which one sees several partitions, unless the records of many rows would take too much memory.
  static bool worth_splitting(const std::vector<AttentionTile>& tiles, int64_t head_dim) {
    int64_t most = 0, floats = 0;
    for (const AttentionTile& tile : tiles) {
      most = std::max(most, tile.partitions());
      floats += tile.partitions() * tile.rows() * record_floats(head_dim);
    }
    return tiles.size() < kManyTiles && most > 1 && floats <= kMostRecordFloats;
  }

  // One task a tile and partition, then one a tile that folds; the bits are those of whole tiles.
  void attend_partitions(const Context& context, const AttentionInputs& in, const std::vector<AttentionTile>& tiles) const {
    struct Task {
      size_t tile;
      int64_t partition;
    };
    std::vector<Task> tasks;
    std::vector<int64_t> starts;  // of a tile's records
    int64_t floats = 0;
    for (size_t i = 0; i < tiles.size(); ++i) {
      starts.push_back(floats);
      floats += tiles[i].partitions() * tiles[i].rows() * record_floats(in.shape.head_dim);
      for (int64_t p = 0; p < tiles[i].partitions(); ++p) tasks.push_back({i, p});
    }
    const Scratch<float> records(floats);
    context.parallel(tasks.size(), [&](size_t i) {
      const AttentionTile& tile = tiles[tasks[i].tile];
      float* to = records.data + starts[tasks[i].tile] + tasks[i].partition * tile.rows() * record_floats(in.shape.head_dim);
      kernels_->attend_partition(in.shape, in.pool, tile, tasks[i].partition, to);
    });
    context.parallel(tiles.size(), [&](size_t i) { kernels_->fold(in.shape, tiles[i], records.data + starts[i], tiles[i].partitions()); });
  }

  const AttentionKernels* kernels_;
  AttentionShape attributes_;
};

const Signature kPagedAttention{"PagedAttention", {1, 1, 6, 6, 6, 6, 0, 0, 1, 1, 1, 1, 2}, 8, {1}, 1};

}  // namespace

void register_paged_attention(Registry& registry) {
  static Op<PagedAttention> op(&kPagedAttention);
  registry.add(&op);
}

}  // namespace stepwell
