// QuantLinear with AMX: tiles of 16 rows of codes x 64 k times 64 k x 16 outputs.
//
// Limit: a tile product takes 16 cycles and multiplies 16 x 64 x 16; what has to happen after it, per row and output,
// costs more when it happens often. So a panel is unpacked once for all rows, with the integer sub-scales multiplied in:
// codes times sub-scale are 16-bit numbers, of which the low and the high bytes are a tile each, and a float step of up
// to 256 k stays in two accumulators. The sum low + 256 * high is the integer that the contract (FORMAT.md) asks for.
// Two blocks of rows share each tile of weights. Lines of a slice lie in a panel as the rows of a tile do.
//
// The same code runs over a plain C++ emulation of the tiles (STEPWELL_ISA=amx-emulated), so that it is tested on
// machines without AMX; blocks of at most kRowBlock rows take the AVX-512 kernels.
#include <immintrin.h>

#include <initializer_list>

#include "quant_linear_kernel.h"
#include "vector_avx512.h"

namespace stepwell {
namespace {

constexpr int kTileRows = 16;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kSliceBytes = 512;  // of 8-bit codes
constexpr int64_t kUnitSlices = 8;    // of the two-level formats

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tile numbers: accumulators of the first and the second block of rows, for low and high bytes; rows; weights.
enum : int { kLow0 = 0, kHigh0 = 1, kLow1 = 2, kHigh1 = 3, kRows0 = 4, kRows1 = 5, kWeightLow = 6, kWeightHigh = 7 };

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

  // A unit's codes as tiles of weights. `high` bytes exist in the two-level formats only.
  struct Unit {
    const uint8_t* low;
    const uint8_t* high;
    __m512 scale, minimum;
    __m512i pairs[kUnitSlices];  // sub-minimums (q6k: sub-scales) of two slices (halves of one) each, as int16 pairs
    __m512i ones[kUnitSlices];   // the same with zero for the second, for steps of one slice
  };

  // Times the sub-scale of each row (both int16 of a lane), low and high bytes of the products apart.
  static void expand_line(__m512i codes, __m512i sub_scale, uint8_t* low, uint8_t* high) {
    const __m512i bytes = _mm512_set1_epi16(0xff);
    const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(codes, bytes), sub_scale);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(codes, 8), sub_scale);
    constexpr int kChoose = 0xca;  // first ? second : third
    _mm512_store_si512(low, _mm512_ternarylogic_epi32(bytes, even, _mm512_slli_epi16(odd, 8), kChoose));
    _mm512_store_si512(high, _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(even, 8), odd, kChoose));
  }

  static __m512i both_words(__m512i x) { return Avx512::pair(x, x); }

  // Reads a unit of `slices` at p; returns where the next one starts.
  static const uint8_t* read_unit(const uint8_t* p, int64_t slices, uint8_t* low, uint8_t* high, Unit& unit) {
    unit.scale = unit.minimum = _mm512_setzero_ps();
    if constexpr (f.unit != 0) {
      unit.scale = Avx512::load_f16(p);
      p += 32;
      if constexpr (f.has_min) {
        unit.minimum = Avx512::load_f16(p);
        if constexpr (f.two_level) unit.minimum = Avx512::negate(unit.minimum);
        p += 32;
      }
    }
    unit.low = low;
    unit.high = high;
    if constexpr (f.two_level) {
      const uint8_t* sub_scales = p;
      p += f.has_min ? 128 : 256;
      const uint8_t* sub_mins = p;
      if constexpr (f.has_min) p += 128;
      const __m512i zero = _mm512_setzero_si512();
      for (int64_t b = 0; b < kUnitSlices; ++b) {
        __m512i first, second;
        if constexpr (f.sub_block == 16) {
          first = Avx512::load_i8(sub_scales + 32 * b);
          second = Avx512::load_i8(sub_scales + 32 * b + 16);
          unit.pairs[b] = Avx512::pair(first, second);
        } else {
          first = second = Avx512::load_u8(sub_scales + 16 * b);
          const __m512i minimum = Avx512::load_u8(sub_mins + 16 * b);
          unit.ones[b] = Avx512::pair(minimum, zero);
          if (b % 2 == 0) unit.pairs[b / 2] = Avx512::pair(minimum, Avx512::load_u8(sub_mins + 16 * b + 16));
        }
        const __m512i scales[2] = {both_words(first), both_words(second)};
        for (int64_t line = 0; line < slice_bytes(f.bits); line += kLineBytes) Avx512::prefetch(p + kPrefetch + line);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g)
          expand_line(K::line_of<f.bits>(p, g), scales[g / 4], low + b * kSliceBytes + g * kLineBytes,
                      high + b * kSliceBytes + g * kLineBytes);
        p += slice_bytes(f.bits);
      }
    } else if constexpr (f.bits == 8) {
      unit.low = p;
      p += slices * kSliceBytes;
    } else {
      static_assert(f.unit == kSlice);
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) _mm512_store_si512(low + g * kLineBytes, K::line_of<f.bits>(p, g));
      p += slice_bytes(f.bits);
    }
    return p;
  }

  // The products of `slices` slices of codes (of a row, `stride` apart) with the unit's slices from `at` on.
  template <int kBlocks>
  static void multiply(Tiles& tiles, const int8_t* codes, int64_t stride, const Unit& unit, int64_t at, int64_t slices, bool deep,
                       int32_t (&products)[4][16][16]) {
    tiles.template zero<kLow0>();
    if constexpr (f.two_level) tiles.template zero<kHigh0>();
    if constexpr (kBlocks == 2) {
      tiles.template zero<kLow1>();
      if constexpr (f.two_level) tiles.template zero<kHigh1>();
    }
    for (int64_t s = 0; s < slices; s += deep ? 2 : 1) {
      tiles.template load<kRows0>(codes + s * kSlice, stride);
      if constexpr (kBlocks == 2) tiles.template load<kRows1>(codes + kTileRows * stride + s * kSlice, stride);
      tiles.template load<kWeightLow>(unit.low + (at + s) * kSliceBytes, kLineBytes);
      tiles.template multiply_add<kLow0, kRows0, kWeightLow, false>();
      if constexpr (kBlocks == 2) tiles.template multiply_add<kLow1, kRows1, kWeightLow, false>();
      if constexpr (f.two_level) {
        constexpr bool kSigned = f.sub_block == 16;
        tiles.template load<kWeightHigh>(unit.high + (at + s) * kSliceBytes, kLineBytes);
        tiles.template multiply_add<kHigh0, kRows0, kWeightHigh, kSigned>();
        if constexpr (kBlocks == 2) tiles.template multiply_add<kHigh1, kRows1, kWeightHigh, kSigned>();
      }
    }
    tiles.template store<kLow0>(products[kLow0], 64);
    if constexpr (f.two_level) tiles.template store<kHigh0>(products[kHigh0], 64);
    if constexpr (kBlocks == 2) {
      tiles.template store<kLow1>(products[kLow1], 64);
      if constexpr (f.two_level) tiles.template store<kHigh1>(products[kHigh1], 64);
    }
  }

  // What the zero point or the minimum adds: see FORMAT.md. `slice` is the step's first in the row, `at` in the unit.
  static __m512i correction(const Activations& x, int64_t row, int64_t slice, int64_t at, int64_t slices, const Unit& unit) {
    const int64_t all = x.k / kSlice;
    if constexpr (f.two_level) {
      __m512i low = _mm512_setzero_si512();
      if constexpr (f.sub_block == 16) {
        const int16_t* halves = x.half_sums + row * 2 * all + 2 * slice;
        for (int64_t b = 0; b < slices; ++b) low = Avx512::pair_dot(low, unit.pairs[at + b], K::load_pair(halves + 2 * b));
      } else {
        const int16_t* sums = x.sums + row * all + slice;
        if (slices == 1) return Avx512::pair_dot(low, unit.ones[at], sums[0]);
        for (int64_t b = 0; b < slices; b += 2) low = Avx512::pair_dot(low, unit.pairs[(at + b) / 2], K::load_pair(sums + b));
      }
      return low;
    } else {
      const int16_t* sums = x.sums + row * all + slice;
      int32_t sum = 0;
      for (int64_t b = 0; b < slices; ++b) sum += sums[b];
      return _mm512_set1_epi32(sum);
    }
  }

  // Products of a step to the float sums of a block's rows.
  static void add_step(const Activations& x, int64_t row, int count, int64_t slice, int64_t at, int64_t slices, const Unit& unit,
                       const int32_t (&low)[16][16], const int32_t (&high)[16][16], float* out) {
    const int64_t groups = x.k / x.group, group = slice * kSlice / x.group;
    for (int r = 0; r < count; ++r) {
      __m512i total = _mm512_load_si512(low[r]);
      if constexpr (f.two_level) total = _mm512_add_epi32(total, _mm512_slli_epi32(_mm512_load_si512(high[r]), 8));
      const __m512i corrected = correction(x, row + r, slice, at, slices, unit);
      if constexpr (!f.has_min) total = _mm512_sub_epi32(total, _mm512_mullo_epi32(corrected, _mm512_set1_epi32(f.zero)));
      const __m512 xs = _mm512_set1_ps(x.scales[(row + r) * groups + group]);
      __m512 acc = _mm512_loadu_ps(out + r * kPanelRows);
      acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), f.unit == 0 ? xs : _mm512_mul_ps(unit.scale, xs), acc);
      if constexpr (f.has_min) acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(corrected), _mm512_mul_ps(unit.minimum, xs), acc);
      _mm512_storeu_ps(out + r * kPanelRows, acc);
    }
  }

  // All of a panel for rows [first, first + count): whole pairs of blocks, or one pair that is not whole.
  static void pass(const uint8_t* p, const Activations& x, int64_t first, int count, float* out) {
    const int64_t slices = x.k / kSlice;
    const int64_t unit_slices = f.unit == 0 ? slices : f.unit / kSlice;
    const int64_t group = x.group / kSlice;
    const int64_t step = group < unit_slices ? group : unit_slices;
    const int full = count < 2 * kTileRows ? count : 2 * kTileRows;
    const int counts[2] = {full < kTileRows ? full : kTileRows, full < kTileRows ? 0 : full - kTileRows};

    const bool deep = step % 2 == 0;  // a step of one slice, or of an odd number of them (c8), takes tiles of half the depth
    TileConfig config;
    for (int tile : {kLow0, kHigh0, kRows0}) config.rows[tile] = static_cast<uint8_t>(counts[0]);
    for (int tile : {kLow1, kHigh1, kRows1}) config.rows[tile] = static_cast<uint8_t>(counts[1] > 0 ? counts[1] : 1);
    for (int tile : {kLow0, kHigh0, kLow1, kHigh1, kWeightLow, kWeightHigh}) config.row_bytes[tile] = 64;
    for (int tile : {kRows0, kRows1}) config.row_bytes[tile] = deep ? 64 : 32;
    for (int tile : {kWeightLow, kWeightHigh}) config.rows[tile] = deep ? 16 : 8;
    Tiles tiles;
    tiles.configure(config);

    alignas(64) uint8_t low[kUnitSlices * kSliceBytes], high[kUnitSlices * kSliceBytes];
    alignas(64) int32_t products[4][16][16];
    std::memset(out, 0, static_cast<size_t>(count * kPanelRows) * sizeof(float));
    Unit unit;
    for (int64_t u = 0; u < slices; u += unit_slices) {
      p = read_unit(p, unit_slices, low, high, unit);
      for (int64_t v = 0; v < unit_slices; v += step) {
        for (int r = 0; r < count; r += full) {
          const int64_t row = first + r;
          const int8_t* codes = x.codes + row * x.k + (u + v) * kSlice;
          float* to = out + r * kPanelRows;
          if (counts[1] > 0) {
            multiply<2>(tiles, codes, x.k, unit, v, step, deep, products);
            add_step(x, row, counts[0], u + v, v, step, unit, products[kLow0], products[kHigh0], to);
            add_step(x, row + kTileRows, counts[1], u + v, v, step, unit, products[kLow1], products[kHigh1], to + kTileRows * kPanelRows);
          } else {
            multiply<1>(tiles, codes, x.k, unit, v, step, deep, products);
            add_step(x, row, counts[0], u + v, v, step, unit, products[kLow0], products[kHigh0], to);
          }
        }
      }
    }
    tiles.release();
    if constexpr (f.unit == 0)
      for (int r = 0; r < count; ++r)
        _mm512_storeu_ps(out + r * kPanelRows, _mm512_mul_ps(_mm512_loadu_ps(out + r * kPanelRows), _mm512_loadu_ps(p)));
  }

  static void rows(const uint8_t* p, const Activations& x, int64_t first, int count, float* out) {
    const int whole = count - count % (2 * kTileRows);
    if (whole > 0) pass(p, x, first, whole, out);
    if (whole < count) pass(p, x, first + whole, count - whole, out + whole * kPanelRows);
  }
};

template <class Tiles>
void panel_wide(Format format, const uint8_t* p, const Activations& x, int64_t first, int count, float* out) {
  switch (format) {
    case Format::kQ4:
      return Wide<Tiles, Format::kQ4>::rows(p, x, first, count, out);
    case Format::kQ4m:
      return Wide<Tiles, Format::kQ4m>::rows(p, x, first, count, out);
    case Format::kQ6s:
      return Wide<Tiles, Format::kQ6s>::rows(p, x, first, count, out);
    case Format::kQ6m:
      return Wide<Tiles, Format::kQ6m>::rows(p, x, first, count, out);
    case Format::kQ8:
      return Wide<Tiles, Format::kQ8>::rows(p, x, first, count, out);
    case Format::kQ4k:
      return Wide<Tiles, Format::kQ4k>::rows(p, x, first, count, out);
    case Format::kQ6k2:
      return Wide<Tiles, Format::kQ6k2>::rows(p, x, first, count, out);
    case Format::kQ6k:
      return Wide<Tiles, Format::kQ6k>::rows(p, x, first, count, out);
    case Format::kC8:
      return Wide<Tiles, Format::kC8>::rows(p, x, first, count, out);
    default:
      return;  // float formats have no tiles: the caller never asks
  }
}

}  // namespace

LinearKernels linear_kernels_amx(bool emulated) {
  LinearKernels kernels = kLinearAvx512;
  kernels.panel_wide = emulated ? panel_wide<EmulatedTiles> : panel_wide<HardwareTiles>;
  return kernels;
}

}  // namespace stepwell
