// QuantLinear: checks, scratch and the split of work; the kernels do the arithmetic.
#include "quant_linear.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>

#include "library.h"
#include "op.h"
#include "scratch.h"

namespace stepwell {
namespace {

constexpr size_t kMostSegments = 64;
constexpr int64_t kChunkBytes = 128 << 10;  // of panels in one unit of parallel work
constexpr int64_t kTileRows = 16;           // rows whose products with one panel are finished together
constexpr int64_t kWideTileRows = 64;       // the same where a kernel unpacks a panel once for all of them
constexpr int64_t kGateFloats = 16 << 10;   // products of gates that wait for their ups

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

struct Segment {
  Format format;
  int64_t rows;    // outputs
  int64_t offset;  // of its first panel in the blob
  int64_t stride;  // bytes of a panel
  int64_t panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
};

class QuantLinear {
 public:
  explicit QuantLinear(const Attributes& attributes)
      : kernels_(&linear_kernels(choose_isa())),
        k_(checked_size(kName, "k", attributes.integer("k"))),
        group_(k_),
        swiglu_(attributes.integer("swiglu") != 0) {
    const std::vector<int64_t> rows = attributes.integers("rows");
    const std::vector<std::string> formats = split(attributes.text("formats"));
    if (rows.empty() || rows.size() != formats.size())
      fail("QuantLinear: %zu rows and %zu formats, expected one of each per segment", rows.size(), formats.size());
    if (rows.size() > kMostSegments) fail("QuantLinear: %zu segments, expected up to %zu", rows.size(), kMostSegments);
    for (size_t i = 0; i < rows.size(); ++i) {
      const Format format = parse_format(kName, formats[i].c_str(), k_);
      const Segment segment{format, checked_size(kName, "rows", rows[i]), bytes_, panel_bytes(format, k_)};
      segments_.push_back(segment);
      bytes_ += segment.panels() * segment.stride;
      (info(format).is_float ? any_float_ : any_integer_) = true;
      outputs_ += segment.rows;
      if (i + 1 < rows.size() && rows[i] % kPanelRows != 0 && !swiglu_)
        fail("QuantLinear: segment %zu has %lld rows; all but the last must be a multiple of 16", i, static_cast<long long>(rows[i]));
    }
    if (swiglu_) {
      if (segments_.size() != 2 || segments_[0].rows != segments_[1].rows)
        fail("QuantLinear: swiglu needs two segments of equal rows, gate then up");
      outputs_ = segments_[0].rows;
    }
    if (!any_integer_) return;  // float rows are multiplied as they are
    const int64_t bits = attributes.integer("act_bits");
    if (bits != 8 && bits != 16) fail("QuantLinear: act_bits is %lld, expected 8 or 16", static_cast<long long>(bits));
    planes_ = bits == 16 ? 2 : 1;
    group_ = checked_group(kName, attributes.integer("act_group"), k_);
  }

  void compute(const Context& context) const {
    const Tensor x = context.input(0, "x");
    const bool quantized = x.dtype == Dtype::kInt8;
    if (!quantized && x.dtype != Dtype::kFloat) fail("QuantLinear: input x is %s, expected float32 or int8", dtype_name(x.dtype));
    check_shape(context, x, std::array<int64_t, 2>{-1, k_});
    const int64_t rows = x.shape[0];
    if (quantized && planes_ == 2) fail("QuantLinear: act_bits 16 takes float32 rows, input x is int8");
    if (quantized && any_float_) fail("QuantLinear: a float weight takes float32 rows, input x is int8");
    const Tensor weight = context.input(2, "weight", Dtype::kUint8);
    check_shape(context, weight, std::array<int64_t, 1>{bytes_});
    const float* bias = nullptr;
    if (context.has_input(3)) {
      if (swiglu_) fail("QuantLinear: swiglu takes no bias");
      const Tensor tensor = context.input(3, "bias", Dtype::kFloat);
      check_shape(context, tensor, std::array<int64_t, 1>{outputs_});
      bias = tensor.as<float>();
    }
    const float* residual = nullptr;
    if (context.has_input(4)) {
      const Tensor tensor = context.input(4, "residual", Dtype::kFloat);
      check_shape(context, tensor, std::array<int64_t, 2>{rows, outputs_});
      residual = tensor.as<float>();
    }
    float* out = context.output<float>(0, std::array<int64_t, 2>{rows, outputs_});
    if (rows == 0) return;

    const int64_t groups = k_ / group_;
    const int64_t code_rows = rows * planes_;
    const bool needs_codes = any_integer_;
    Scratch<int8_t> codes(needs_codes && !quantized ? code_rows * k_ : 0);
    Scratch<float> scales(needs_codes && !quantized ? code_rows * groups : 0);
    Scratch<int16_t> half_sums(needs_codes ? code_rows * (k_ / 16) : 0), sums(needs_codes ? code_rows * (k_ / kSlice) : 0);
    Activations integers{quantized ? x.as<int8_t>() : codes.data, scales.data, half_sums.data, sums.data, nullptr, code_rows, k_, group_};
    if (quantized) {
      const Tensor scale = context.input(1, "x_scale", Dtype::kFloat);
      check_shape(context, scale, std::array<int64_t, 2>{rows, groups});
      integers.scales = scale.as<float>();
    }
    Activations floats{nullptr, nullptr, nullptr, nullptr, quantized ? nullptr : x.as<float>(), rows, k_, group_};
    if (needs_codes) prepare(context, x, quantized, codes.data, scales.data, half_sums.data, sums.data);

    const Job job{weight.as<uint8_t>(), integers, floats, rows, bias, residual, out};
    // A unit of work is a run of panels (for SwiGLU, of panel pairs) over all rows; every thread writes its own columns.
    const int64_t panels = swiglu_ ? segments_[0].panels() : total_panels();
    const int64_t most = kGateFloats / (tile_rows(rows) * kPanelRows);
    const int64_t per_chunk = std::clamp<int64_t>(kChunkBytes / std::max<int64_t>(1, bytes_ / panels), 1, most);
    const int64_t chunks = (panels + per_chunk - 1) / per_chunk;
    context.parallel(static_cast<size_t>(chunks), [&](size_t chunk) {
      const int64_t from = static_cast<int64_t>(chunk) * per_chunk;
      run_panels(job, from, std::min(panels, from + per_chunk));
    });
  }

  static constexpr const char* kName = "QuantLinear";

 private:
  int64_t total_panels() const {
    int64_t panels = 0;
    for (const Segment& segment : segments_) panels += segment.panels();
    return panels;
  }

  void prepare(const Context& context, const Tensor& x, bool quantized, int8_t* codes, float* scales, int16_t* half_sums,
               int16_t* sums) const {
    const int64_t rows = x.shape[0], groups = k_ / group_;
    constexpr int64_t kRowsAtOnce = 8;
    const int64_t work = rows >= 2 * kRowsAtOnce ? (rows + kRowsAtOnce - 1) / kRowsAtOnce : 1;
    const int64_t each = (rows + work - 1) / work;
    context.parallel(static_cast<size_t>(work), [&](size_t part) {
      const int64_t from = static_cast<int64_t>(part) * each, to = std::min(rows, from + each);
      for (int64_t row = from; row < to; ++row) {
        const int8_t* row_codes = quantized ? x.as<int8_t>() + row * k_ : codes + row * planes_ * k_;
        if (!quantized)
          kernels_->quantize(x.as<float>() + row * k_, k_, group_, planes_, codes + row * planes_ * k_, scales + row * planes_ * groups);
        for (int64_t plane = 0, at = row * planes_; plane < planes_; ++plane, ++at)
          kernels_->sum_codes(row_codes + plane * k_, k_, half_sums + at * (k_ / 16), sums + at * (k_ / kSlice));
      }
    });
  }

  struct Job {
    const uint8_t* weight;
    Activations integers, floats;
    int64_t rows;
    const float* bias;
    const float* residual;
    float* out;
  };

  // Products of rows [first, first + count) with one panel, the planes of a row added up. `out` is [count, 16].
  void product(const Job& job, const Segment& segment, int64_t panel, int64_t first, int64_t count, float* out) const {
    const uint8_t* p = job.weight + segment.offset + panel * segment.stride;
    if (info(segment.format).is_float) return each_block(job.floats, segment.format, p, first, count, out);
    if (planes_ == 1) return each_block(job.integers, segment.format, p, first, count, out);
    alignas(64) float both[2 * kWideTileRows * kPanelRows];
    each_block(job.integers, segment.format, p, 2 * first, 2 * count, both);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < kPanelRows; ++j) out[r * kPanelRows + j] = both[2 * r * kPanelRows + j] + both[(2 * r + 1) * kPanelRows + j];
  }

  void each_block(const Activations& x, Format format, const uint8_t* p, int64_t first, int64_t count, float* out) const {
    if (kernels_->panel_wide != nullptr && !info(format).is_float && count > kRowBlock)
      return kernels_->panel_wide(format, p, x, first, static_cast<int>(count), out);
    for (int64_t done = 0; done < count; done += kRowBlock)
      kernels_->panel(format, p, x, first + done, static_cast<int>(std::min<int64_t>(count - done, kRowBlock)), out + done * kPanelRows);
  }

  int64_t tile_rows(int64_t rows) const { return kernels_->panel_wide != nullptr && rows > kTileRows ? kWideTileRows : kTileRows; }

  // Panels [from, to) of all rows: a tile of rows stays in L1 (L2 where they are many) while the run's panels come by.
  // For SwiGLU all gates come before the ups: each run of panels is then one stream that prefetching can follow.
  void run_panels(const Job& job, int64_t from, int64_t to) const {
    alignas(64) float gates[kGateFloats], product_of_panel[kWideTileRows * kPanelRows];
    const int64_t tile = tile_rows(job.rows);
    for (int64_t first = 0; first < job.rows; first += tile) {
      const int64_t count = std::min<int64_t>(tile, job.rows - first);
      const auto gate_of = [&](int64_t panel) { return gates + (panel - from) * tile * kPanelRows; };
      if (swiglu_)
        for (int64_t panel = from; panel < to; ++panel) product(job, segments_[0], panel, first, count, gate_of(panel));
      for (int64_t panel = from; panel < to; ++panel) {
        const auto [segment, local, column] = swiglu_ ? Place{&segments_[1], panel, panel * kPanelRows} : locate(panel);
        product(job, *segment, local, first, count, product_of_panel);
        const int64_t width = std::min<int64_t>(kPanelRows, segment->rows - local * kPanelRows);
        for (int64_t r = 0; r < count; ++r)
          finish(job, product_of_panel + r * kPanelRows, gate_of(panel) + r * kPanelRows, first + r, column, width);
      }
    }
  }

  // Bias, SwiGLU (lanes are the ups) and residual of one row's products with a panel, then out they go.
  void finish(const Job& job, float* lanes, const float* gate, int64_t row, int64_t column, int64_t width) const {
    if (job.bias != nullptr)
      for (int64_t j = 0; j < width; ++j) lanes[j] += job.bias[column + j];
    if (swiglu_) kernels_->swiglu(gate, lanes, lanes);
    const int64_t at = row * outputs_ + column;
    if (job.residual != nullptr)
      for (int64_t j = 0; j < width; ++j) lanes[j] += job.residual[at + j];
    std::memcpy(job.out + at, lanes, static_cast<size_t>(width) * sizeof(float));
  }

  struct Place {
    const Segment* segment;
    int64_t panel;   // within the segment
    int64_t column;  // of its first output
  };
  Place locate(int64_t panel) const {
    int64_t column = 0;
    for (const Segment& segment : segments_) {
      if (panel < segment.panels()) return {&segment, panel, column + panel * kPanelRows};
      panel -= segment.panels();
      column += segment.rows;
    }
    return {&segments_.back(), 0, 0};  // not reached: panels are counted over the segments
  }

  const LinearKernels* kernels_;
  int64_t k_;
  int64_t group_;
  int planes_ = 1;  // int8 planes of a row's codes
  bool swiglu_;
  std::vector<Segment> segments_;
  int64_t bytes_ = 0;
  int64_t outputs_ = 0;
  bool any_float_ = false;
  bool any_integer_ = false;
};

const Signature kQuantLinear{QuantLinear::kName, {0, 1, 2, 1, 1}, 1, {1}, 1};

}  // namespace

int64_t checked_group(const char* op, int64_t group, int64_t k) {
  if (group == 0) return k;
  if ((group != 32 && group != 64 && group != 128 && group != 256) || k % group != 0)
    fail("%s: act_group %lld must be 0, 32, 64, 128 or 256 and divide k %lld", op, static_cast<long long>(group),
         static_cast<long long>(k));
  return group;
}

int64_t checked_size(const char* op, const char* attribute, int64_t value) {
  constexpr int64_t kMost = int64_t{1} << 24;
  if (value < 1 || value > kMost) fail("%s: attribute %s is %lld, expected 1 to 2^24", op, attribute, static_cast<long long>(value));
  return value;
}

Format parse_format(const char* op, const char* name, int64_t k) {
  for (int i = 0; i < kFormats; ++i) {
    const FormatInfo& f = kFormatInfo[i];
    if (std::strcmp(f.name, name) != 0) continue;
    const int64_t multiple = f.is_float ? 1 : f.unit == 256 ? 256 : kSlice;
    if (k % multiple != 0)
      fail("%s: format %s needs k to be a multiple of %lld, got %lld", op, name, static_cast<long long>(multiple),
           static_cast<long long>(k));
    if (static_cast<Format>(i) == Format::kC8 && k > 65536)
      fail("%s: format c8 takes k up to 65536, got %lld", op, static_cast<long long>(k));
    return static_cast<Format>(i);
  }
  fail("%s: unknown weight format %s", op, name);
}

const LinearKernels& linear_kernels(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kAvx2:
      return kLinearAvx2;
    case Isa::kAvx512Vnni:
      return kLinearAvx512;
    case Isa::kAmx: {
      static const LinearKernels kernels = linear_kernels_amx(false);
      return kernels;
    }
    case Isa::kAmxEmulated: {
      static const LinearKernels kernels = linear_kernels_amx(true);
      return kernels;
    }
    case Isa::kPortable:
      break;
  }
#endif
  (void)isa;
  return kLinearPortable;
}

void register_quant_linear(Registry& registry) {
  static Op<QuantLinear> op(&kQuantLinear);
  registry.add(&op);
}

}  // namespace stepwell
