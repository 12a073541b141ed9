// Quantized rows times quantized weights; FORMAT.md states the contract, the panel layout and the arithmetic.
//
// Limit: at one row the product streams the panels once, so its bound is memory bandwidth (K*N*bits/8 bytes plus
// scales); at many rows it is the int8 multiply rate. Rows are taken several at a time (as registers allow) against one unpacked
// slice of codes, so the cost of unpacking and of streaming is shared, and every row keeps its own arithmetic.
#pragma once

#include <cstdint>

#include "isa.h"

namespace stepwell {

constexpr int kPanelRows = 16;
constexpr int kSlice = 32;
constexpr int kRowBlock = 8;
constexpr int kUnit = 256;  // the most elements of K that a float step takes

enum class Format : int { kQ4, kQ4m, kQ6s, kQ6m, kQ8, kQ4k, kQ6k2, kQ6k, kC8, kF16, kBf16, kF32 };
constexpr int kFormats = 12;

struct FormatInfo {
  const char* name;
  int bits;        // of a code; of the float itself for float formats
  int unit;        // elements of K that share a unit's header; 0: all of K
  bool two_level;  // integer sub-scales under a float16 scale
  bool has_min;    // value = scale * code + min
  int zero;        // value = scale * (code - zero)
  int sub_block;   // elements that share a sub-scale
  bool is_float;
};

constexpr FormatInfo kFormatInfo[kFormats] = {
    {"q4", 4, 32, false, false, 8, 32, false},  {"q4m", 4, 32, false, true, 0, 32, false},   {"q6s", 6, 32, false, false, 16, 32, false},
    {"q6m", 6, 32, false, true, 0, 32, false},  {"q8", 8, 32, false, false, 128, 32, false}, {"q4k", 4, 256, true, true, 0, 32, false},
    {"q6k2", 6, 256, true, true, 0, 32, false}, {"q6k", 6, 256, true, false, 32, 16, false}, {"c8", 8, 0, false, false, 128, 32, false},
    {"f16", 16, 0, false, false, 0, 0, true},   {"bf16", 16, 0, false, false, 0, 0, true},   {"f32", 32, 0, false, false, 0, 0, true},
};

constexpr const FormatInfo& info(Format format) { return kFormatInfo[static_cast<int>(format)]; }

constexpr int64_t slice_bytes(int bits) { return kSlice * kPanelRows * bits / 8; }

// Bytes of a unit's scales, before its codes (c8: none, its scales follow the last slice).
constexpr int64_t header_bytes(Format format) {
  const FormatInfo& f = info(format);
  if (f.is_float || f.unit == 0) return 0;
  if (!f.two_level) return f.has_min ? 64 : 32;
  return f.has_min ? 64 + 2 * 128 : 32 + 256;
}

// Bytes of a panel of 16 rows.
constexpr int64_t panel_bytes(Format format, int64_t k) {
  const FormatInfo& f = info(format);
  if (f.is_float) return k * kPanelRows * f.bits / 8;
  const int64_t codes = k / kSlice * slice_bytes(f.bits);
  return f.unit == 0 ? codes + 64 : codes + k / f.unit * header_bytes(format);
}

// Throws OpError for an unknown name or a K that the format cannot hold.
Format parse_format(const char* op, const char* name, int64_t k);

// `group` of an act_group attribute: k for 0. Throws OpError unless it is 0 or one of the sizes that divide k.
int64_t checked_group(const char* op, int64_t group, int64_t k);
// `value` of an attribute that must be 1 to 2^24 (bytes of a segment then stay far below 2^63); throws OpError.
int64_t checked_size(const char* op, const char* attribute, int64_t value);

// Quantized activations. With act_bits 16 a row is two: the coarse codes, then the rest at 1/254 of the scale.
struct Activations {
  const int8_t* codes = nullptr;       // [rows, k]
  const float* scales = nullptr;       // [rows, k / group]
  const int16_t* half_sums = nullptr;  // [rows, k / 16], sums of 16 codes
  const int16_t* sums = nullptr;       // [rows, k / 32], sums of a slice
  const int8_t* tiles = nullptr;       // the codes in TileOrder, for run_wide
  const float* floats = nullptr;       // [rows, k], for float formats
  int64_t rows = 0;
  int64_t k = 0;
  int64_t group = 0;  // elements that share a scale; k when a row has one, which `finish` then multiplies
  bool grouped() const { return group != k; }
};

// Codes as tiles of 16 rows x 64 k in the order they are multiplied, one stream a column of 256 k: [ceil(k / 256),
// ceil(rows / 32), up to 4 tiles, 2 blocks of rows, 16, 64], zero where there are no codes.
constexpr int kRowTile = 16;
constexpr int kTileK = 64;
constexpr int kTileBytes = kRowTile * kTileK;
struct TileOrder {
  int64_t k, pairs;  // of blocks
  TileOrder(int64_t rows, int64_t columns) : k(columns), pairs((rows + 2 * kRowTile - 1) / (2 * kRowTile)) {}
  int64_t bytes() const { return 2 * kTileBytes * pairs * ((k + kTileK - 1) / kTileK); }
  // Of the first tile of a block in the column that starts at k = `column`; the next one lies two tiles further.
  int64_t offset(int64_t block, int64_t column) const {
    const int64_t tiles = column + kUnit <= k ? kUnit / kTileK : (k - column + kTileK - 1) / kTileK;
    return 2 * kTileBytes * (pairs * (column / kTileK) + block / 2 * tiles) + block % 2 * kTileBytes;
  }
};
// Packs up to 16 rows of codes as one block.
void pack_block(const int8_t* codes, int64_t rows, const TileOrder& order, int64_t block, int8_t* tiles);

// Sums of products with a panel, [rows * planes, 16]: what they still have to be multiplied by, or null.
struct Sums {
  const float* sums = nullptr;
  const float* row_scales = nullptr;  // [rows * planes]
  const float* channel = nullptr;     // [16]
  int planes = 1;                     // consecutive rows that are one row's
};

// Sums of one panel to rows of the output: y = swiglu(gates, x + bias) + residual, with what is not null.
struct Epilogue {
  Sums x, gates;
  const float* bias = nullptr;      // [width]
  const float* residual = nullptr;  // like out
  float* out = nullptr;             // [rows, width], rows `stride` apart
  int64_t stride = 0;
  int width = 0;  // up to 16
};

// A run of panels in one format, `stride` bytes apart.
struct Panels {
  Format format;
  const uint8_t* first;
  int64_t stride;
  int64_t count;
};

// One ISA's kernels.
struct LinearKernels {
  // Sums of rows [first, first + count), count <= kRowBlock, with one panel: out is [count, 16].
  void (*panel)(Format format, const uint8_t* panel, const Activations& x, int64_t first, int count, float* out);
  void (*finish)(const Epilogue& epilogue, int64_t rows);
  // One row of k floats -> codes, group scales (planes = 2 also fills the second row of each).
  void (*quantize)(const float* x, int64_t k, int64_t group, int planes, int8_t* codes, float* scales);
  void (*sum_codes)(const int8_t* codes, int64_t k, int16_t* half_sums, int16_t* sums);
  void (*rms_norm)(const float* x, const float* gamma, int64_t k, float epsilon, float* out);
  // Sums of any number of rows from `first` on (a multiple of kRowTile) with a run of panels in an integer format, worth
  // it for more than kRowBlock rows: out is [panels, count, 16]. Null where the ISA has no such kernel.
  void (*run_wide)(const Panels& panels, const Activations& x, int64_t first, int64_t count, float* out);
};

const LinearKernels& linear_kernels(Isa isa);
extern const LinearKernels kLinearPortable;
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
LinearKernels linear_kernels_amx(bool emulated);

// True when the AMX kernels give the portable ones' bits on a small product of every format; says so on stderr if not.
bool amx_agrees();

}  // namespace stepwell
