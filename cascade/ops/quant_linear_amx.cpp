// QuantLinear with AMX: tiles of 16 rows of codes x 64 k times 64 k x 16 outputs.
//
// Limit: a tile product takes 16 cycles and multiplies 16 x 64 x 16. Two blocks of rows times two tiles of weights share
// their loads, which then take half the time of the products. What has to happen besides, unpacking weights and adding
// a step's sums in float, goes between the products of the next step: the vector ports are free while tiles multiply.
//
// Two tiles of weights are the same columns of two panels; or, with sub-scales, two digits of codes times sub-scale of
// one panel, so that a float step of 256 k takes one sum: code * sub-scale = low + 8 * high where the sub-scale has six
// bits (a digit of three bits times a code fits a byte), low + 256 * high in q6k. Zero points are taken off the weights
// as they are unpacked, once for all rows. All of it is exact: the sums are those that FORMAT.md asks for.
//
// Order: rows of a call (512, what fits L2) > columns that fit with them > panels > chunks of 256 k, unpacked into L1
// > pairs of row blocks > steps. Lines of a slice lie in a panel as the rows of a tile do.
//
// The same code runs over a plain C++ emulation of the tiles (STEPWELL_ISA=amx-emulated), so that it is tested on
// machines without AMX; calls of at most kRowBlock rows take the AVX-512 kernels.
#include <immintrin.h>

#include <algorithm>
#include <initializer_list>

#include "quant_linear_kernel.h"
#include "vector_avx512.h"

namespace stepwell {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kSliceBytes = 512;  // of codes, a byte each
constexpr int64_t kChunkSlices = kUnit / kSlice;
constexpr int64_t kPairRows = 2 * kRowTile;
constexpr int64_t kRowsBytes = 1 << 20;  // of codes that stay in L2 while a run's panels come by
constexpr int64_t kAhead = 4096;         // bytes of weights to prefetch

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tile numbers: sums of two blocks of rows with two tiles of weights; the rows; the weights.
enum : int { kSum00 = 0, kSum01 = 1, kSum10 = 2, kSum11 = 3, kRows0 = 4, kRows1 = 5, kWeights0 = 6, kWeights1 = 7 };

// Inline assembly: the intrinsics of GCC 12 paste the tile number as text and cannot take a template parameter.
struct HardwareTiles {
  void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
  void release() { asm volatile("tilerelease"); }
  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  // Signed rows times unsigned or signed weights.
  template <int kTo, int kLeft, int kRight, bool kSigned>
  void multiply_add() {
    if constexpr (kSigned)
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kTo), "i"(kLeft), "i"(kRight));
    else
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kTo), "i"(kLeft), "i"(kRight));
  }
};

struct EmulatedTiles {
  TileConfig shape;
  uint8_t data[8][16][64];

  void configure(const TileConfig& config) { shape = config; }
  void release() {}
  template <int kTile>
  void zero() {
    std::memset(data[kTile], 0, sizeof data[kTile]);
  }
  template <int kTile>
  void load(const void* from, int64_t stride) {
    for (int row = 0; row < shape.rows[kTile]; ++row)
      std::memcpy(data[kTile][row], static_cast<const uint8_t*>(from) + row * stride, shape.row_bytes[kTile]);
  }
  template <int kTile>
  void store(void* to, int64_t stride) {
    for (int row = 0; row < shape.rows[kTile]; ++row)
      std::memcpy(static_cast<uint8_t*>(to) + row * stride, data[kTile][row], shape.row_bytes[kTile]);
  }
  template <int kTo, int kLeft, int kRight, bool kSigned>
  void multiply_add() {
    for (int m = 0; m < shape.rows[kTo]; ++m) {
      for (int n = 0; n < shape.row_bytes[kTo] / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, &data[kTo][m][4 * n], 4);
        for (int byte = 0; byte < shape.row_bytes[kLeft]; ++byte) {
          const uint8_t weight = data[kRight][byte / 4][4 * n + byte % 4];
          sum += static_cast<int8_t>(data[kLeft][m][byte]) * (kSigned ? static_cast<int8_t>(weight) : weight);
        }
        std::memcpy(&data[kTo][m][4 * n], &sum, 4);
      }
    }
  }
};

template <class Tiles, Format F>
struct Wide {
  static constexpr FormatInfo f = info(F);
  using K = Kernels<Avx512>;
  static constexpr int64_t kPanels = f.two_level ? 1 : 2;  // that share the rows' tiles
  static constexpr bool kSubMins = f.two_level && f.has_min;
  static constexpr int kDigit = f.sub_block == 16 ? 8 : 3;  // bits of the low digit of code * sub-scale
  // Rows are signed; weights are unsigned where no zero point was taken off, or low bytes.
  static constexpr bool kSigned0 = !f.has_min && !f.two_level, kSigned1 = !f.has_min;

  // Up to 256 k of kPanels panels, ready to be multiplied.
  struct Chunk {
    alignas(64) uint8_t weights[2 * kChunkSlices * kSliceBytes];          // two slices of the one, two of the other, and so on
    __m512 scale[kPanels][kChunkSlices], minimum[kPanels][kChunkSlices];  // [0] only where a unit is 256 k
    __m512i sub_mins[kChunkSlices / 2];                                   // of two slices each, as int16 pairs
    __m512i single_mins[kChunkSlices];                                    // the same with zero for the second
    int64_t first = 0, slices = 0;                                        // within the row
    const uint8_t* from[kPanels] = {};
    static int64_t place(int64_t i, int64_t slice) { return (slice / 2 * 4 + i * 2 + slice % 2) * kSliceBytes; }
    float* sums[kPanels] = {};  // of the call's rows; null for a panel that is not there

    void expand(int64_t slice) {
      if constexpr (f.two_level) {
        expand_two_level(slice);
      } else {
        for (int64_t i = 0; i < kPanels; ++i) {
          constexpr int64_t header = header_bytes(F), size = header + slice_bytes(f.bits);
          const uint8_t* p = from[i] + slice * size;
          for (int64_t line = 0; line < size; line += kLineBytes) Avx512::prefetch(p + kAhead + line);
          if constexpr (header > 0) scale[i][slice] = Avx512::load_f16(p);
          if constexpr (f.has_min) minimum[i][slice] = Avx512::load_f16(p + 32);
          uint8_t* to = weights + place(i, slice);
          const __m512i zero = _mm512_set1_epi8(static_cast<char>(f.zero));
#pragma GCC unroll 8
          for (int g = 0; g < 8; ++g) {
            __m512i codes = K::template line_of<f.bits>(p + header, g);
            if constexpr (f.bits == 8) codes = _mm512_xor_si512(codes, zero);  // less 128
            if constexpr (f.bits < 8 && !f.has_min) codes = _mm512_sub_epi8(codes, zero);
            _mm512_store_si512(to + g * kLineBytes, codes);
          }
        }
      }
    }

    void expand_two_level(int64_t slice) {
      const uint8_t* unit = from[0];
      const uint8_t* sub_scales = unit + (f.has_min ? 64 : 32);
      if (slice == 0) scale[0][0] = Avx512::load_f16(unit);
      const uint8_t* p = unit + header_bytes(F) + slice * slice_bytes(f.bits);
      for (int64_t line = 0; line < slice_bytes(f.bits); line += kLineBytes) Avx512::prefetch(p + kAhead + line);
      uint8_t* low = weights + place(0, slice);
      uint8_t* high = weights + place(1, slice);
      if constexpr (kSubMins) {
        const uint8_t* mins = sub_scales + 128;
        if (slice == 0) minimum[0][0] = Avx512::negate(Avx512::load_f16(unit + 32));
        const __m512i minimums = Avx512::load_u8(mins + 16 * slice);
        single_mins[slice] = Avx512::pair(minimums, _mm512_setzero_si512());
        if (slice % 2 == 0) sub_mins[slice / 2] = Avx512::pair(minimums, Avx512::load_u8(mins + 16 * slice + 16));
        const __m512i sub_scale = Avx512::load_u8(sub_scales + 16 * slice);
        const __m512i digits0 = both_words(_mm512_and_si512(sub_scale, _mm512_set1_epi32(7)));
        const __m512i digits1 = both_words(_mm512_srli_epi32(sub_scale, 3));
        // Two codes a word times a digit of three bits: the product of the low one does not reach the high one's byte.
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
          const __m512i codes = K::template line_of<f.bits>(p, g);
          _mm512_store_si512(low + g * kLineBytes, _mm512_mullo_epi16(codes, digits0));
          _mm512_store_si512(high + g * kLineBytes, _mm512_mullo_epi16(codes, digits1));
        }
      } else {
        const __m512i scales[2] = {both_words(Avx512::load_i8(sub_scales + 32 * slice)),
                                   both_words(Avx512::load_i8(sub_scales + 32 * slice + 16))};
        const __m512i zeros[2] = {_mm512_slli_epi16(scales[0], 5), _mm512_slli_epi16(scales[1], 5)};
        static_assert(f.zero == 32 || !f.two_level || f.has_min);
        const __m512i low_bytes = _mm512_set1_epi16(0xff);
        constexpr int kChoose = 0xca;  // first ? second : third
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
          const __m512i codes = K::template line_of<f.bits>(p, g), sub_scale = scales[g / 4], zero = zeros[g / 4];
          const __m512i even = _mm512_sub_epi16(_mm512_mullo_epi16(_mm512_and_si512(codes, low_bytes), sub_scale), zero);
          const __m512i odd = _mm512_sub_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(codes, 8), sub_scale), zero);
          _mm512_store_si512(low + g * kLineBytes, _mm512_ternarylogic_epi32(low_bytes, even, _mm512_slli_epi16(odd, 8), kChoose));
          _mm512_store_si512(high + g * kLineBytes, _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(even, 8), odd, kChoose));
        }
      }
    }
  };

  static __m512i both_words(__m512i x) { return Avx512::pair(x, x); }

  // Chunks in the order they are multiplied: columns that fit L2, panels, chunks.
  struct Cursor {
    const Panels& panels;
    int64_t all, part, rows;  // slices of K, slices of the columns that go together, rows of the call
    float* sums;
    int64_t column = 0, panel = 0, slice = 0;

    bool next(Chunk& chunk) {
      if (column >= all) return false;
      const int64_t end = std::min(all, column + part);
      chunk.first = slice;
      chunk.slices = std::min(kChunkSlices, end - slice);
      for (int64_t i = 0; i < kPanels; ++i) {
        const bool there = panel + i < panels.count;
        constexpr int64_t kSliceSize = f.two_level ? 0 : header_bytes(F) + slice_bytes(f.bits);
        constexpr int64_t kUnitSize = f.two_level ? header_bytes(F) + kChunkSlices * slice_bytes(f.bits) : 0;
        chunk.from[i] = panels.first + (there ? panel + i : panel) * panels.stride + slice * kSliceSize + slice / kChunkSlices * kUnitSize;
        chunk.sums[i] = there ? sums + (panel + i) * rows * kPanelRows : nullptr;
      }
      slice += kChunkSlices;
      if (slice < end) return true;
      panel += kPanels;
      if (panel >= panels.count) panel = 0, column += part;
      slice = column;
      return true;
    }
  };

  // A step's products with a pair of blocks, and where they go.
  struct Step {
    alignas(64) int32_t products[2][2][kRowTile][kPanelRows];  // [block of rows, tile of weights]
    const Chunk* chunk = nullptr;
    int64_t at = 0, slices = 0;             // within the chunk
    int64_t first = 0, rows = 0, done = 0;  // rows of the call
  };

  // Where the rows of a step that are to be added lie: row r of [from, to) is row `row0 + r` of the activations.
  struct Rows {
    int64_t from, to, row0;
    const int32_t* products;
    const float* scales;  // of row 0 and this step, `groups` apart
    int64_t groups;
    static int64_t place(int64_t r) { return r * kPanelRows + r / kRowTile * (kRowTile * kPanelRows); }
  };
  static constexpr int64_t kNextTile = kRowTile * kPanelRows;

  template <bool kGrouped>
  static __m512 times(__m512 scale, const Rows& rows, int64_t r) {
    return kGrouped ? _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[r * rows.groups])) : scale;
  }

  // kPairs: pairs of slices in a step, 0 for a single slice.
  template <bool kGrouped, int kPairs>
  static void add_two_level(const Step& step, const Activations& x, const Rows& rows) {
    const Chunk& chunk = *step.chunk;
    const __m512 scale = chunk.scale[0][0], minimum = chunk.minimum[0][0];
    __m512i mins[kPairs > 0 ? kPairs : 1];
    if constexpr (kSubMins)
      for (int i = 0; i < std::max(kPairs, 1); ++i) mins[i] = kPairs > 0 ? chunk.sub_mins[step.at / 2 + i] : chunk.single_mins[step.at];
    const int64_t all = x.k / kSlice;
    const int16_t* sums = x.sums + rows.row0 * all + chunk.first + step.at;
    float* out = chunk.sums[0] + step.first * kPanelRows;
    for (int64_t r = rows.from; r < rows.to; ++r) {
      const int32_t* products = rows.products + Rows::place(r);
      const __m512i total =
          _mm512_add_epi32(_mm512_load_si512(products), _mm512_slli_epi32(_mm512_load_si512(products + kNextTile), kDigit));
      __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), times<kGrouped>(scale, rows, r), _mm512_loadu_ps(out + r * kPanelRows));
      if constexpr (kSubMins) {
        __m512i low = _mm512_setzero_si512();
        if constexpr (kPairs == 0) low = Avx512::pair_dot(low, mins[0], sums[r * all]);
#pragma GCC unroll 4
        for (int i = 0; i < kPairs; ++i) low = Avx512::pair_dot(low, mins[i], K::load_pair(sums + r * all + 2 * i));
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), times<kGrouped>(minimum, rows, r), sum);
      }
      _mm512_storeu_ps(out + r * kPanelRows, sum);
    }
  }

  template <bool kGrouped>
  static void add_panel(const Step& step, const Activations& x, const Rows& rows, int64_t i) {
    const Chunk& chunk = *step.chunk;
    const __m512 scale = f.unit == 0 ? _mm512_set1_ps(1.0f) : chunk.scale[i][step.at], minimum = chunk.minimum[i][step.at];
    const int64_t all = x.k / kSlice;
    const int16_t* sums = x.sums + rows.row0 * all + chunk.first + step.at;
    float* out = chunk.sums[i] + step.first * kPanelRows;
    for (int64_t r = rows.from; r < rows.to; ++r) {
      const __m512 total = _mm512_cvtepi32_ps(_mm512_load_si512(rows.products + Rows::place(r) + i * kNextTile));
      __m512 sum = _mm512_loadu_ps(out + r * kPanelRows);
      if constexpr (f.unit == 0 && !kGrouped)
        sum = _mm512_add_ps(total, sum);
      else if constexpr (f.unit == 0)
        sum = _mm512_fmadd_ps(total, _mm512_set1_ps(rows.scales[r * rows.groups]), sum);
      else
        sum = _mm512_fmadd_ps(total, times<kGrouped>(scale, rows, r), sum);
      if constexpr (f.has_min)
        sum = _mm512_fmadd_ps(_mm512_set1_ps(static_cast<float>(sums[r * all])), times<kGrouped>(minimum, rows, r), sum);
      _mm512_storeu_ps(out + r * kPanelRows, sum);
    }
  }

  // Adds up to `count` more rows of a step to the float sums.
  template <bool kGrouped>
  static void add_rows(Step& step, const Activations& x, int64_t first, int64_t count) {
    if (step.done == step.rows) return;
    Rows rows{step.done, std::min(step.rows, step.done + count), first + step.first, step.products[0][0][0], nullptr, x.k / x.group};
    rows.scales = x.scales + rows.row0 * rows.groups + (step.chunk->first + step.at) * kSlice / x.group;
    step.done = rows.to;
    if constexpr (!f.two_level) {
      for (int64_t i = 0; i < kPanels; ++i)
        if (step.chunk->sums[i] != nullptr) add_panel<kGrouped>(step, x, rows, i);
    } else if (!kSubMins || step.slices == 8) {
      add_two_level<kGrouped, 4>(step, x, rows);
    } else if constexpr (kGrouped) {
      switch (step.slices) {
        case 4:
          return add_two_level<kGrouped, 2>(step, x, rows);
        case 2:
          return add_two_level<kGrouped, 1>(step, x, rows);
        default:
          return add_two_level<kGrouped, 0>(step, x, rows);
      }
    }
  }

  static TileConfig config(bool deep) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = 16, config.row_bytes[tile] = 64;
    if (!deep) {
      for (int tile : {kRows0, kRows1}) config.row_bytes[tile] = 32;
      for (int tile : {kWeights0, kWeights1}) config.rows[tile] = 8;
    }
    return config;
  }

  // The products of a step with one or two blocks of rows; `between` is called after each.
  template <int kBlocks, typename Between>
  static void multiply(Tiles& tiles, const int8_t* codes, const Chunk& chunk, Step& step, bool deep, Between&& between) {
    tiles.template zero<kSum00>();
    tiles.template zero<kSum01>();
    if constexpr (kBlocks == 2) {
      tiles.template zero<kSum10>();
      tiles.template zero<kSum11>();
    }
    for (int64_t s = step.at; s < step.at + step.slices; s += deep ? 2 : 1) {
      const int8_t* rows = codes + s / 2 * (2 * kTileBytes) + s % 2 * kSlice;
      tiles.template load<kRows0>(rows, kTileK);
      tiles.template load<kWeights0>(chunk.weights + Chunk::place(0, s), kLineBytes);
      tiles.template multiply_add<kSum00, kRows0, kWeights0, kSigned0>();
      tiles.template load<kWeights1>(chunk.weights + Chunk::place(1, s), kLineBytes);
      tiles.template multiply_add<kSum01, kRows0, kWeights1, kSigned1>();
      if constexpr (kBlocks == 2) {
        tiles.template load<kRows1>(rows + kTileBytes, kTileK);
        tiles.template multiply_add<kSum10, kRows1, kWeights0, kSigned0>();
        tiles.template multiply_add<kSum11, kRows1, kWeights1, kSigned1>();
      }
      between();
    }
    tiles.template store<kSum00>(step.products[0][0], kLineBytes);
    tiles.template store<kSum01>(step.products[0][1], kLineBytes);
    if constexpr (kBlocks == 2) {
      tiles.template store<kSum10>(step.products[1][0], kLineBytes);
      tiles.template store<kSum11>(step.products[1][1], kLineBytes);
    }
  }

  template <bool kGrouped>
  static void run(const Panels& panels, const Activations& x, int64_t first, int64_t count, float* out) {
    const int64_t slices = x.k / kSlice, group = x.group / kSlice;
    const int64_t longest = std::min(group, f.unit == 0 || f.unit == kUnit ? kChunkSlices : 1);
    const bool deep = longest % 2 == 0 && slices % 2 == 0;
    const TileOrder order(x.rows, x.k);
    const int64_t part = std::max(kChunkSlices, kRowsBytes / (count * kSlice) / kChunkSlices * kChunkSlices);
    std::memset(out, 0, static_cast<size_t>(panels.count * count * kPanelRows) * sizeof(float));

    // One is multiplied, the next is filled, and the last step of the one before may still have to be added.
    Chunk chunks[3];
    Step steps[2];
    Cursor cursor{panels, slices, part, count, out};
    if (!cursor.next(chunks[0])) return;
    for (int64_t s = 0; s < chunks[0].slices; ++s) chunks[0].expand(s);
    Tiles tiles;
    tiles.configure(config(deep));
    int turn = 0;
    bool more = true;
    for (int now = 0; more; now = (now + 1) % 3) {
      const Chunk& chunk = chunks[now];
      Chunk& coming = chunks[(now + 1) % 3];
      more = cursor.next(coming);
      int64_t expanded = 0;
      const int64_t to_expand = more ? coming.slices : 0;
      for (int64_t row = 0; row < count; row += kPairRows) {
        for (int64_t at = 0; at < chunk.slices; at += longest) {
          Step& step = steps[turn];
          Step& before = steps[turn ^ 1];
          turn ^= 1;
          step.chunk = &chunk;
          step.at = at;
          step.slices = std::min(longest, chunk.slices - at);
          step.first = row;
          step.rows = std::min(kPairRows, count - row);
          step.done = 0;
          const int64_t products = deep ? step.slices / 2 : step.slices;
          const int64_t share = (before.rows + products - 1) / products;
          const auto between = [&] {
            add_rows<kGrouped>(before, x, first, share);
            for (int i = 0; i < 2 && expanded < to_expand; ++i) coming.expand(expanded++);
          };
          const int8_t* codes = x.tiles + order.offset((first + row) / kRowTile, chunk.first * kSlice);
          if (step.rows > kRowTile)
            multiply<2>(tiles, codes, chunk, step, deep, between);
          else
            multiply<1>(tiles, codes, chunk, step, deep, between);
        }
      }
      while (expanded < to_expand) coming.expand(expanded++);
    }
    tiles.release();
    Step& last = steps[turn ^ 1];
    add_rows<kGrouped>(last, x, first, last.rows);
  }
};

template <class Tiles, Format F>
void run_format(const Panels& panels, const Activations& x, int64_t first, int64_t count, float* out) {
  if (x.grouped())
    Wide<Tiles, F>::template run<true>(panels, x, first, count, out);
  else
    Wide<Tiles, F>::template run<false>(panels, x, first, count, out);
}

template <class Tiles>
void run_wide(const Panels& panels, const Activations& x, int64_t first, int64_t count, float* out) {
  switch (panels.format) {
    case Format::kQ4:
      return run_format<Tiles, Format::kQ4>(panels, x, first, count, out);
    case Format::kQ4m:
      return run_format<Tiles, Format::kQ4m>(panels, x, first, count, out);
    case Format::kQ6s:
      return run_format<Tiles, Format::kQ6s>(panels, x, first, count, out);
    case Format::kQ6m:
      return run_format<Tiles, Format::kQ6m>(panels, x, first, count, out);
    case Format::kQ8:
      return run_format<Tiles, Format::kQ8>(panels, x, first, count, out);
    case Format::kQ4k:
      return run_format<Tiles, Format::kQ4k>(panels, x, first, count, out);
    case Format::kQ6k2:
      return run_format<Tiles, Format::kQ6k2>(panels, x, first, count, out);
    case Format::kQ6k:
      return run_format<Tiles, Format::kQ6k>(panels, x, first, count, out);
    case Format::kC8:
      return run_format<Tiles, Format::kC8>(panels, x, first, count, out);
    default:
      return;  // float formats have no tiles: the caller never asks
  }
}

}  // namespace

LinearKernels linear_kernels_amx(bool emulated) {
  LinearKernels kernels = kLinearAvx512;
  kernels.run_wide = emulated ? run_wide<EmulatedTiles> : run_wide<HardwareTiles>;
  return kernels;
}

}  // namespace stepwell
