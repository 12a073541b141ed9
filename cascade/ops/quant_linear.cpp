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
constexpr int64_t kRunBytes = 128 << 10;   // of panels in one unit of parallel work
constexpr int64_t kSumsBytes = 512 << 10;  // of a run's sums, which stay in L2 while K goes by
constexpr int64_t kNarrowRows = 16;        // code rows whose sums with a run of panels are finished together
constexpr int64_t kWideRows = 512;         // the same where a kernel unpacks a panel once for all of them

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
    if (rows.size() != formats.size())
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
    const int64_t groups = k_ / group_;
    const float* given_scales = nullptr;
    if (quantized) {
      const Tensor tensor = context.input(1, "x_scale", Dtype::kFloat);
      check_shape(context, tensor, std::array<int64_t, 2>{rows, groups});
      given_scales = tensor.as<float>();
    }
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

    const int64_t code_rows = any_integer_ ? rows * planes_ : 0;
    const bool wide = kernels_->run_wide != nullptr && code_rows > kRowBlock;
    Scratch<int8_t> codes(quantized ? 0 : code_rows * k_), tiles(wide ? TileOrder(code_rows, k_).bytes() : 0);
    Scratch<float> scales(quantized ? 0 : code_rows * groups);
    Scratch<int16_t> half_sums(code_rows * (k_ / 16)), sums(code_rows * (k_ / kSlice));
    const Activations integers{quantized ? x.as<int8_t>() : codes.data,
                               quantized ? given_scales : scales.data,
                               half_sums.data,
                               sums.data,
                               tiles.data,
                               nullptr,
                               code_rows,
                               k_,
                               group_};
    Activations floats;
    floats.floats = quantized ? nullptr : x.as<float>();
    floats.rows = rows;
    floats.k = k_;
    if (any_integer_) prepare(context, x, quantized, wide, codes.data, scales.data, half_sums.data, sums.data, tiles.data);

    const Job job{weight.as<uint8_t>(), integers, floats, rows, wide, bias, residual, out};
    // A unit of work is a run of panels (for SwiGLU, of panel pairs) over all rows; every thread writes its own columns.
    const int64_t panels = swiglu_ ? segments_[0].panels() : total_panels();
    const int64_t most = kSumsBytes / (job.tile_rows(planes_) * planes_ * kPanelRows * int64_t{sizeof(float)} * (swiglu_ ? 2 : 1));
    const int64_t per_run = std::clamp<int64_t>(kRunBytes / std::max<int64_t>(1, bytes_ / panels), 1, wide ? most : 16);
    const int64_t runs = (panels + per_run - 1) / per_run;
    context.parallel(static_cast<size_t>(runs), [&](size_t run) {
      const int64_t from = static_cast<int64_t>(run) * per_run;
      run_panels(job, from, std::min(panels, from + per_run));
    });
  }

  static constexpr const char* kName = "QuantLinear";

 private:
  int64_t total_panels() const {
    int64_t panels = 0;
    for (const Segment& segment : segments_) panels += segment.panels();
    return panels;
  }

  // Codes, scales and sums of the rows, and with `wide` their tiles.
  void prepare(const Context& context, const Tensor& x, bool quantized, bool wide, int8_t* codes, float* scales, int16_t* half_sums,
               int16_t* sums, int8_t* tiles) const {
    const int64_t rows = x.shape[0], groups = k_ / group_;
    const int64_t each = kRowTile / planes_;  // rows whose tiles are whole
    context.parallel(static_cast<size_t>((rows + each - 1) / each), [&](size_t part) {
      const int64_t from = static_cast<int64_t>(part) * each, to = std::min(rows, from + each);
      if (quantized) check_codes(x, from, to);
      const int8_t* part_codes = quantized ? x.as<int8_t>() + from * k_ : codes + from * planes_ * k_;
      for (int64_t row = from; row < to && !quantized; ++row)
        kernels_->quantize(x.as<float>() + row * k_, k_, group_, planes_, codes + row * planes_ * k_, scales + row * planes_ * groups);
      for (int64_t at = from * planes_; at < to * planes_; ++at)
        kernels_->sum_codes(part_codes + (at - from * planes_) * k_, k_, half_sums + at * (k_ / 16), sums + at * (k_ / kSlice));
      if (wide) pack_block(part_codes, (to - from) * planes_, TileOrder(rows * planes_, k_), static_cast<int64_t>(part), tiles);
    });
  }

  // -128 has no opposite, which the ISAs' ways to multiply signed codes need; no quantizer here makes it.
  void check_codes(const Tensor& x, int64_t from, int64_t to) const {
    for (int64_t row = from; row < to; ++row) {
      const int8_t* codes = x.as<int8_t>() + row * k_;
      bool found = false;
      for (int64_t i = 0; i < k_; ++i) found |= codes[i] == -128;
      if (found) fail("QuantLinear: input x holds -128 in row %lld, expected codes from -127 to 127", static_cast<long long>(row));
    }
  }

  struct Job {
    const uint8_t* weight;
    Activations integers, floats;
    int64_t rows;
    bool wide;
    const float* bias;
    const float* residual;
    float* out;
    int64_t tile_rows(int planes) const { return std::min(rows, (wide ? kWideRows : kNarrowRows) / planes); }
  };

  int planes(const Segment& segment) const { return info(segment.format).is_float ? 1 : planes_; }

  // Sums of rows [first, first + count) with panels [from, from + panels) of a segment: out is [panels, count * planes, 16].
  void multiply(const Job& job, const Segment& segment, int64_t from, int64_t panels, int64_t first, int64_t count, float* out) const {
    const bool is_float = info(segment.format).is_float;
    const Activations& x = is_float ? job.floats : job.integers;
    const uint8_t* p = job.weight + segment.offset + from * segment.stride;
    first *= planes(segment);
    count *= planes(segment);
    if (job.wide && !is_float) return kernels_->run_wide(Panels{segment.format, p, segment.stride, panels}, x, first, count, out);
    for (int64_t panel = 0; panel < panels; ++panel, p += segment.stride)
      for (int64_t done = 0; done < count; done += kRowBlock)
        kernels_->panel(segment.format, p, x, first + done, static_cast<int>(std::min<int64_t>(count - done, kRowBlock)),
                        out + (panel * count + done) * kPanelRows);
  }

  Sums sums_of(const Job& job, const Segment& segment, int64_t panel, int64_t first, const float* sums) const {
    Sums result{sums, nullptr, nullptr, planes(segment)};
    if (!info(segment.format).is_float && !job.integers.grouped()) result.row_scales = job.integers.scales + first * planes_;
    if (segment.format == Format::kC8)
      result.channel = reinterpret_cast<const float*>(job.weight + segment.offset + (panel + 1) * segment.stride - 64);
    return result;
  }

  // Panels [from, to) of all rows: the sums of a tile of rows stay in L2 while the run's panels come by.
  // For SwiGLU all gates come before the ups: each run of panels is then one stream that prefetching can follow.
  void run_panels(const Job& job, int64_t from, int64_t to) const {
    const int64_t tile = job.tile_rows(planes_), each = tile * planes_ * kPanelRows;
    Scratch<float> sums((to - from) * each), gates(swiglu_ ? (to - from) * each : 0);
    for (int64_t first = 0; first < job.rows; first += tile) {
      const int64_t count = std::min<int64_t>(tile, job.rows - first);
      if (swiglu_) multiply(job, segments_[0], from, to - from, first, count, gates.data);
      for (int64_t panel = from; panel < to;) {
        const auto [segment, local, column] = swiglu_ ? Place{&segments_[1], panel, panel * kPanelRows} : locate(panel);
        const int64_t panels = std::min(to - panel, segment->panels() - local);
        multiply(job, *segment, local, panels, first, count, sums.data);
        for (int64_t i = 0; i < panels; ++i) {
          const int64_t at = column + i * kPanelRows, row_at = first * outputs_ + at;
          Epilogue epilogue;
          epilogue.x = sums_of(job, *segment, local + i, first, sums.data + i * count * planes(*segment) * kPanelRows);
          if (swiglu_)
            epilogue.gates = sums_of(job, segments_[0], local + i, first, gates.data + i * count * planes(segments_[0]) * kPanelRows);
          epilogue.bias = job.bias == nullptr ? nullptr : job.bias + at;
          epilogue.residual = job.residual == nullptr ? nullptr : job.residual + row_at;
          epilogue.out = job.out + row_at;
          epilogue.stride = outputs_;
          epilogue.width = static_cast<int>(std::min<int64_t>(kPanelRows, segment->rows - (local + i) * kPanelRows));
          kernels_->finish(epilogue, count);
        }
        panel += panels;
      }
    }
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
    return static_cast<Format>(i);
  }
  fail("%s: unknown weight format %s", op, name);
}

void pack_block(const int8_t* codes, int64_t rows, const TileOrder& order, int64_t block, int8_t* tiles) {
  for (int64_t column = 0; column < order.k; column += kUnit) {
    int8_t* to = tiles + order.offset(block, column);
    for (int64_t at = column; at < std::min(order.k, column + kUnit); at += kTileK, to += kTileBytes)
      for (int64_t row = 0; row < kRowTile; ++row, to += kTileK) {
        const int64_t size = row < rows ? std::min<int64_t>(kTileK, order.k - at) : 0;
        if (size == kTileK) {
          std::memcpy(to, codes + row * order.k + at, kTileK);
          continue;
        }
        std::memset(to, 0, kTileK);
        if (size > 0) std::memcpy(to, codes + row * order.k + at, static_cast<size_t>(size));
      }
  }
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
