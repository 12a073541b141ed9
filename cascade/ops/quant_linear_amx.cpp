// QuantLinear with AMX: up to 16 rows of activations times a slice of 16 outputs x 32 k is one tile product.
//
// A tile: rows x 32 signed bytes; B tile: the eight lines of a slice, unsigned codes (a line is a tile row as it lies in
// the panel); C tile: rows x 16 int32. Where the format has no sub-scales the products of a whole float step stay in C.
// The same code runs over a plain C++ emulation of the tiles (STEPWELL_ISA=amx-emulated), so that it is tested on
// machines without AMX; blocks of at most kRowBlock rows take the AVX-512 kernels.
#include <immintrin.h>

#include <cstdio>

#include "quant_linear_kernel.h"

namespace stepwell {
namespace {

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tile numbers: C, A and B of a slice, A and B of half a slice (formats with sub-blocks of 16).
enum : int { kC = 0, kA = 1, kB = 2, kHalfA = 3, kHalfB = 4 };

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
  template <int kTo, int kLeft, int kRight>
  void multiply_add() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kTo), "i"(kLeft), "i"(kRight));
  }
};

struct EmulatedTiles {
  TileConfig shape;
  uint8_t data[5][16][64];

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
  template <int kTo, int kLeft, int kRight>
  void multiply_add() {
    for (int m = 0; m < shape.rows[kTo]; ++m) {
      for (int n = 0; n < shape.row_bytes[kTo] / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, &data[kTo][m][4 * n], 4);
        for (int byte = 0; byte < shape.row_bytes[kLeft]; ++byte)
          sum += static_cast<int8_t>(data[kLeft][m][byte]) * data[kRight][byte / 4][4 * n + byte % 4];
        std::memcpy(&data[kTo][m][4 * n], &sum, 4);
      }
    }
  }
};

// One slice of codes as eight 64-byte lines of 8-bit codes; 8-bit formats are used where they lie.
template <int kBits>
const uint8_t* lines_of(const uint8_t* p, uint8_t* buffer) {
  if constexpr (kBits == 8) return p;
  const __m512i nibble = _mm512_set1_epi8(15), two = _mm512_set1_epi8(3);
  for (int g = 0; g < 4; ++g) {
    const __m512i line = _mm512_loadu_si512(p + 64 * g);
    _mm512_store_si512(buffer + 64 * g, _mm512_and_si512(line, nibble));
    _mm512_store_si512(buffer + 64 * (g + 4), _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble));
  }
  if constexpr (kBits == 6) {
    for (int g = 0; g < 8; ++g) {
      const __m512i line = _mm512_loadu_si512(p + 256 + 64 * (g % 2));
      const __m512i high = _mm512_and_si512(_mm512_srl_epi16(line, _mm_cvtsi32_si128(2 * (g / 2))), two);
      const __m512i low = _mm512_load_si512(buffer + 64 * g);
      _mm512_store_si512(buffer + 64 * g, _mm512_or_si512(low, _mm512_slli_epi16(high, 4)));
    }
  }
  return buffer;
}

template <class Tiles, Format F>
void wide_rows(const uint8_t* p, const Activations& x, int64_t first, int count, float* out) {
  constexpr FormatInfo f = info(F);
  const int64_t slices = x.k / kSlice;
  const int64_t unit = f.unit == 0 ? slices : f.unit / kSlice;
  const int64_t group = x.group / kSlice;
  const int64_t step = group < unit ? group : unit;
  const int64_t groups = slices / group;
  const int8_t* codes_of = x.codes + first * x.k;
  const int16_t* halves_of = x.half_sums + first * 2 * slices;
  const int16_t* sums_of = x.sums + first * slices;
  const float* scales_of = x.scales + first * groups;

  Tiles tiles;
  TileConfig config;
  const uint8_t rows = static_cast<uint8_t>(count);
  config.rows[kC] = config.rows[kA] = config.rows[kHalfA] = rows;
  config.row_bytes[kC] = config.row_bytes[kB] = config.row_bytes[kHalfB] = 64;
  config.row_bytes[kA] = 32;
  config.row_bytes[kHalfA] = 16;
  config.rows[kB] = 8;
  config.rows[kHalfB] = 4;
  tiles.configure(config);

  alignas(64) uint8_t buffer[512];
  alignas(64) int32_t products[16][16];
  __m512 acc[16];
  __m512i total[16], low[16];
  for (int r = 0; r < count; ++r) acc[r] = _mm512_setzero_ps();
  for (int64_t u = 0; u < slices; u += unit) {
    __m512 scale = _mm512_setzero_ps(), minimum = _mm512_setzero_ps();
    const uint8_t* sub_scales = nullptr;
    const uint8_t* sub_mins = nullptr;
    if constexpr (f.unit != 0) {
      scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      p += 32;
      if constexpr (f.has_min) {
        minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        if constexpr (f.two_level) minimum = _mm512_xor_ps(minimum, _mm512_set1_ps(-0.0f));
        p += 32;
      }
    }
    if constexpr (f.two_level) {
      sub_scales = p;
      p += f.has_min ? 128 : 256;
      if constexpr (f.has_min) {
        sub_mins = p;
        p += 128;
      }
    }
    for (int64_t v = 0; v < unit; v += step) {
      for (int r = 0; r < count; ++r) total[r] = low[r] = _mm512_setzero_si512();
      tiles.template zero<kC>();
      for (int64_t b = v; b < v + step; ++b) {
        const uint8_t* lines = lines_of<f.bits>(p, buffer);
        p += slice_bytes(f.bits);
        const int64_t slice = u + b;
        const int8_t* from = codes_of + slice * kSlice;
        if constexpr (f.sub_block == 16) {
          for (int half = 0; half < 2; ++half) {
            const __m512i sub = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sub_scales + 32 * b + 16 * half)));
            tiles.template zero<kC>();
            tiles.template load<kHalfA>(from + 16 * half, x.k);
            tiles.template load<kHalfB>(lines + 256 * half, 64);
            tiles.template multiply_add<kC, kHalfA, kHalfB>();
            tiles.template store<kC>(products, 64);
            for (int r = 0; r < count; ++r) {
              const __m512i zero = _mm512_set1_epi32(f.zero * halves_of[2 * (r * slices + slice) + half]);
              total[r] = _mm512_add_epi32(total[r], _mm512_mullo_epi32(_mm512_sub_epi32(_mm512_load_si512(products[r]), zero), sub));
            }
          }
        } else {
          if constexpr (f.two_level) tiles.template zero<kC>();
          tiles.template load<kA>(from, x.k);
          tiles.template load<kB>(lines, 64);
          tiles.template multiply_add<kC, kA, kB>();
          if constexpr (f.two_level) {
            const __m512i sub = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sub_scales + 16 * b)));
            const __m512i sub_min = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sub_mins + 16 * b)));
            tiles.template store<kC>(products, 64);
            for (int r = 0; r < count; ++r) {
              total[r] = _mm512_add_epi32(total[r], _mm512_mullo_epi32(_mm512_load_si512(products[r]), sub));
              low[r] = _mm512_add_epi32(low[r], _mm512_mullo_epi32(_mm512_set1_epi32(sums_of[r * slices + slice]), sub_min));
            }
          } else {
            for (int r = 0; r < count; ++r) {
              const __m512i sum = _mm512_set1_epi32(sums_of[r * slices + slice]);
              if constexpr (f.has_min)
                low[r] = _mm512_add_epi32(low[r], sum);
              else
                total[r] = _mm512_sub_epi32(total[r], _mm512_mullo_epi32(sum, _mm512_set1_epi32(f.zero)));
            }
          }
        }
      }
      if constexpr (!f.two_level) {
        tiles.template store<kC>(products, 64);
        for (int r = 0; r < count; ++r) total[r] = _mm512_add_epi32(total[r], _mm512_load_si512(products[r]));
      }
      const int64_t g = (u + v) / group;
      for (int r = 0; r < count; ++r) {
        const __m512 xs = _mm512_set1_ps(scales_of[r * groups + g]);
        if constexpr (f.unit == 0) {
          acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[r]), xs, acc[r]);
        } else {
          acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[r]), _mm512_mul_ps(scale, xs), acc[r]);
          if constexpr (f.has_min) acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low[r]), _mm512_mul_ps(minimum, xs), acc[r]);
        }
      }
    }
  }
  tiles.release();
  for (int r = 0; r < count; ++r) {
    if constexpr (f.unit == 0) acc[r] = _mm512_mul_ps(acc[r], _mm512_loadu_ps(p));
    _mm512_storeu_ps(out + r * kPanelRows, acc[r]);
  }
}

template <class Tiles>
void panel_wide(Format format, const uint8_t* p, const Activations& x, int64_t first, int count, float* out) {
  switch (format) {
    case Format::kQ4:
      return wide_rows<Tiles, Format::kQ4>(p, x, first, count, out);
    case Format::kQ4m:
      return wide_rows<Tiles, Format::kQ4m>(p, x, first, count, out);
    case Format::kQ6s:
      return wide_rows<Tiles, Format::kQ6s>(p, x, first, count, out);
    case Format::kQ6m:
      return wide_rows<Tiles, Format::kQ6m>(p, x, first, count, out);
    case Format::kQ8:
      return wide_rows<Tiles, Format::kQ8>(p, x, first, count, out);
    case Format::kQ4k:
      return wide_rows<Tiles, Format::kQ4k>(p, x, first, count, out);
    case Format::kQ6k2:
      return wide_rows<Tiles, Format::kQ6k2>(p, x, first, count, out);
    case Format::kQ6k:
      return wide_rows<Tiles, Format::kQ6k>(p, x, first, count, out);
    case Format::kC8:
      return wide_rows<Tiles, Format::kC8>(p, x, first, count, out);
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
