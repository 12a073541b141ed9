// Holds the AMX kernels against the portable ones before they are used: this library is built on machines without AMX.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "quant_linear.h"

namespace stepwell {

namespace {

// Whether AMX agrees on rows with a scale for every `group` elements: tiles of full depth, or of half for groups of 32.
bool agrees(int64_t group) {
  constexpr int64_t k = 512;
  constexpr int rows = 45;  // a whole pair of blocks and one that is not
  uint32_t state = 1;
  auto next = [&state] { return state = state * 1664525u + 1013904223u; };
  std::vector<float> x(rows * k);
  for (float& value : x) value = static_cast<float>(static_cast<int32_t>(next()) >> 16) * 1e-3f;
  std::vector<int8_t> codes(rows * k);
  const int64_t groups = k / group;
  std::vector<float> scales(rows * groups);
  std::vector<int16_t> half_sums(rows * k / 16), sums(rows * k / kSlice);
  for (int r = 0; r < rows; ++r) {
    kLinearPortable.quantize(&x[r * k], k, group, 1, &codes[r * k], &scales[r * groups]);
    kLinearPortable.sum_codes(&codes[r * k], k, &half_sums[r * k / 16], &sums[r * k / kSlice]);
  }
  const TileOrder order(rows, k);
  std::vector<int8_t> tiles(static_cast<size_t>(order.bytes()));
  for (int r = 0; r < rows; r += kRowTile) pack_block(&codes[r * k], std::min(kRowTile, rows - r), order, r / kRowTile, tiles.data());
  const Activations activations{codes.data(), scales.data(), half_sums.data(), sums.data(), tiles.data(), nullptr, rows, k, group};
  const LinearKernels& amx = linear_kernels(Isa::kAmx);
  for (int i = 0; i < kFormats; ++i) {
    const Format format = static_cast<Format>(i);
    if (info(format).is_float) continue;
    constexpr int kRun = 3;  // panels: a pair and one that has no other
    const int64_t size = panel_bytes(format, k);
    std::vector<uint8_t> panels(static_cast<size_t>(kRun * size));
    // Bytes below 0x3c keep every float16 and float32 in the panels finite; codes of q6k2 have five bits.
    for (uint8_t& byte : panels) byte = static_cast<uint8_t>((next() >> 24) % 0x3c & (format == Format::kQ6k2 ? 0x15 : 0x3f));
    std::array<float, kRun * 16 * rows> wide{}, narrow{};
    amx.run_wide(Panels{format, panels.data(), size, kRun}, activations, 0, rows, wide.data());
    for (int panel = 0; panel < kRun; ++panel)
      for (int first = 0; first < rows; first += kRowBlock)
        kLinearPortable.panel(format, panels.data() + panel * size, activations, first, std::min(kRowBlock, rows - first),
                              narrow.data() + 16 * (panel * rows + first));
    if (std::memcmp(wide.data(), narrow.data(), sizeof wide) != 0) {
      std::fprintf(stderr, "stepwell: the AMX kernel of %s disagrees with the portable one here; AMX is not used\n", info(format).name);
      return false;
    }
  }
  return true;
}

}  // namespace

bool amx_agrees() { return agrees(512) && agrees(32); }

}  // namespace stepwell
