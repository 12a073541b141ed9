// QuantLinear, RMSNormQuant and EmbedDequant: checks, scratch and the split of work; the kernels do the arithmetic.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <sstream>

#include "float16.h"
#include "library.h"
#include "op.h"
#include "quant_linear.h"
#include "scratch.h"

namespace stepwell {
namespace {

constexpr int64_t kChunkBytes = 128 << 10;  // of panels in one unit of parallel work
constexpr int64_t kTileRows = 16;           // rows whose products with one panel are finished together
constexpr int64_t kWideRowBlock = 16;
constexpr int64_t kRowTileBytes = 512 << 10;  // of activation codes that stay in L2 while panels stream past

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

int64_t checked_group(const char* op, int64_t group, int64_t k) {
  if (group == 0) return k;
  if ((group != 32 && group != 64 && group != 128 && group != 256) || k % group != 0)
    fail("%s: act_group %lld must be 0, 32, 64, 128 or 256 and divide k %lld", op, static_cast<long long>(group),
         static_cast<long long>(k));
  return group;
}

int64_t checked_size(const char* op, const char* attribute, int64_t value) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (value < 1 || value >= kMost) fail("%s: attribute %s is %lld, expected 1 to 2^31 - 1", op, attribute, static_cast<long long>(value));
  return value;
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
        group_(attributes.integer("act_group")),
        planes_(attributes.integer("act_bits") == 16 ? 2 : 1),
        swiglu_(attributes.integer("swiglu") != 0) {
    if (const int64_t bits = attributes.integer("act_bits"); bits != 8 && bits != 16)
      fail("QuantLinear: act_bits is %lld, expected 8 or 16", static_cast<long long>(bits));
    group_ = checked_group(kName, group_, k_);
    const std::vector<int64_t> rows = attributes.integers("rows");
    const std::vector<std::string> formats = split(attributes.text("formats"));
    if (rows.empty() || rows.size() != formats.size())
      fail("QuantLinear: %zu rows and %zu formats, expected one of each per segment", rows.size(), formats.size());
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
    Scratch<int16_t> sums(needs_codes ? code_rows * (k_ / 16) : 0);
    Activations integers{quantized ? x.as<int8_t>() : codes.data, scales.data, sums.data, nullptr, code_rows, k_, group_};
    if (quantized) {
      const Tensor scale = context.input(1, "x_scale", Dtype::kFloat);
      check_shape(context, scale, std::array<int64_t, 2>{rows, groups});
      integers.scales = scale.as<float>();
    }
    Activations floats{nullptr, nullptr, nullptr, quantized ? nullptr : x.as<float>(), rows, k_, group_};
    if (needs_codes) prepare(context, x, quantized, codes.data, scales.data, sums.data);

    const Job job{weight.as<uint8_t>(), integers, floats, rows, bias, residual, out};
    // A unit of work is a run of panels (for SwiGLU, of panel pairs) over all rows; every thread writes its own columns.
    const int64_t panels = swiglu_ ? segments_[0].panels() : total_panels();
    const int64_t per_chunk = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, bytes_ / panels));
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

  void prepare(const Context& context, const Tensor& x, bool quantized, int8_t* codes, float* scales, int16_t* sums) const {
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
        for (int plane = 0; plane < planes_; ++plane)
          kernels_->sum_codes(row_codes + plane * k_, k_, sums + (row * planes_ + plane) * (k_ / 16));
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
    alignas(64) float both[2 * kTileRows * kPanelRows];
    each_block(job.integers, segment.format, p, 2 * first, 2 * count, both);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = 0; j < kPanelRows; ++j) out[r * kPanelRows + j] = both[2 * r * kPanelRows + j] + both[(2 * r + 1) * kPanelRows + j];
  }

  void each_block(const Activations& x, Format format, const uint8_t* p, int64_t first, int64_t count, float* out) const {
    int64_t done = 0;
    while (done < count) {
      const bool wide = kernels_->panel_wide != nullptr && !info(format).is_float && count - done > kRowBlock;
      const int64_t block = std::min<int64_t>(count - done, wide ? kWideRowBlock : kRowBlock);
      (wide ? kernels_->panel_wide : kernels_->panel)(format, p, x, first + done, static_cast<int>(block), out + done * kPanelRows);
      done += block;
    }
  }

  // Panels [from, to) of all rows, tile by tile of rows so that the activations stay in L2.
  void run_panels(const Job& job, int64_t from, int64_t to) const {
    const int64_t fitting = std::max<int64_t>(kTileRows, kRowTileBytes / (k_ * planes_) / kTileRows * kTileRows);
    alignas(64) float gate[kTileRows * kPanelRows], up[kTileRows * kPanelRows];
    for (int64_t tile = 0; tile < job.rows; tile += fitting) {
      const int64_t end = std::min(job.rows, tile + fitting);
      for (int64_t panel = from; panel < to; ++panel) {
        const auto [segment, local, column] = locate(panel);
        const int64_t width = std::min<int64_t>(kPanelRows, segment->rows - local * kPanelRows);
        for (int64_t first = tile; first < end; first += kTileRows) {
          const int64_t count = std::min<int64_t>(kTileRows, end - first);
          product(job, *segment, local, first, count, gate);
          if (swiglu_) product(job, segments_[1], local, first, count, up);
          for (int64_t r = 0; r < count; ++r) {
            float* lanes = gate + r * kPanelRows;
            float* other = up + r * kPanelRows;
            if (job.bias != nullptr)
              for (int64_t j = 0; j < width; ++j) lanes[j] += job.bias[column + j];
            if (swiglu_) kernels_->swiglu(lanes, other, lanes);
            const int64_t at = (first + r) * outputs_ + column;
            if (job.residual != nullptr)
              for (int64_t j = 0; j < width; ++j) lanes[j] += job.residual[at + j];
            std::memcpy(job.out + at, lanes, static_cast<size_t>(width) * sizeof(float));
          }
        }
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
  int planes_;
  bool swiglu_;
  std::vector<Segment> segments_;
  int64_t bytes_ = 0;
  int64_t outputs_ = 0;
  bool any_float_ = false;
  bool any_integer_ = false;
};

// What RMSNorm and RMSNormQuant share: the input, its checks and the split of rows.
struct NormInput {
  const float* x;
  const float* gamma;
  int64_t rows, k;

  NormInput(const Context& context) {
    const Tensor tensor = context.input(0, "x", Dtype::kFloat);
    check_shape(context, tensor, std::array<int64_t, 2>{-1, -1});
    x = tensor.as<float>();
    rows = tensor.shape[0];
    k = tensor.shape[1];
    if (k < kPanelRows || k % kPanelRows != 0)
      fail("%s: input x has %lld columns, expected a multiple of 16", context.op(), static_cast<long long>(k));
    const Tensor scale = context.input(1, "gamma", Dtype::kFloat);
    check_shape(context, scale, std::array<int64_t, 1>{k});
    gamma = scale.as<float>();
  }

  template <typename F>
  void each_row(const Context& context, F&& body) const {
    constexpr int64_t kRowsAtOnce = 16;
    context.parallel(static_cast<size_t>((rows + kRowsAtOnce - 1) / kRowsAtOnce), [&](size_t run) {
      const int64_t from = static_cast<int64_t>(run) * kRowsAtOnce, to = std::min(rows, from + kRowsAtOnce);
      for (int64_t row = from; row < to; ++row) body(row);
    });
  }
};

class RmsNorm {
 public:
  static constexpr const char* kName = "RMSNorm";

  explicit RmsNorm(const Attributes& attributes) : kernels_(&linear_kernels(choose_isa())), epsilon_(attributes.real("epsilon")) {}

  void compute(const Context& context) const {
    const NormInput in(context);
    float* out = context.output<float>(0, std::array<int64_t, 2>{in.rows, in.k});
    in.each_row(context, [&](int64_t row) { kernels_->rms_norm(in.x + row * in.k, in.gamma, in.k, epsilon_, out + row * in.k); });
  }

 private:
  const LinearKernels* kernels_;
  float epsilon_;
};

class RmsNormQuant {
 public:
  static constexpr const char* kName = "RMSNormQuant";

  explicit RmsNormQuant(const Attributes& attributes)
      : kernels_(&linear_kernels(choose_isa())), epsilon_(attributes.real("epsilon")), group_(attributes.integer("act_group")) {}

  void compute(const Context& context) const {
    const NormInput in(context);
    const int64_t group = checked_group(kName, group_, in.k), groups = in.k / group;
    int8_t* codes = context.output<int8_t>(0, std::array<int64_t, 2>{in.rows, in.k});
    float* scales = context.output<float>(1, std::array<int64_t, 2>{in.rows, groups});
    Scratch<float> normed(in.rows * in.k);
    in.each_row(context, [&](int64_t row) {
      float* to = normed.data + row * in.k;
      kernels_->rms_norm(in.x + row * in.k, in.gamma, in.k, epsilon_, to);
      kernels_->quantize(to, in.k, group, 1, codes + row * in.k, scales + row * groups);
    });
  }

 private:
  const LinearKernels* kernels_;
  float epsilon_;
  int64_t group_;
};

class EmbedDequant {
 public:
  static constexpr const char* kName = "EmbedDequant";

  explicit EmbedDequant(const Attributes& attributes)
      : k_(checked_size(kName, "k", attributes.integer("k"))),
        rows_(checked_size(kName, "rows", attributes.integer("rows"))),
        format_(parse_format(kName, attributes.text("format").c_str(), k_)) {}

  void compute(const Context& context) const {
    const Tensor ids = context.input(0, "ids", Dtype::kInt64);
    check_shape(context, ids, std::array<int64_t, 1>{-1});
    const Tensor weight = context.input(1, "weight", Dtype::kUint8);
    const int64_t stride = panel_bytes(format_, k_);
    check_shape(context, weight, std::array<int64_t, 1>{(rows_ + kPanelRows - 1) / kPanelRows * stride});
    for (int64_t t = 0; t < ids.count; ++t)
      if (const int64_t id = ids.as<int64_t>()[t]; id < 0 || id >= rows_)
        fail("EmbedDequant: ids[%lld] = %lld, expected 0 to %lld", static_cast<long long>(t), static_cast<long long>(id),
             static_cast<long long>(rows_ - 1));
    float* out = context.output<float>(0, std::array<int64_t, 2>{ids.count, k_});
    context.parallel(static_cast<size_t>(ids.count), [&](size_t t) {
      const int64_t id = ids.as<int64_t>()[t];
      decode_row(format_, weight.as<uint8_t>() + id / kPanelRows * stride, static_cast<int>(id % kPanelRows), k_,
                 out + static_cast<int64_t>(t) * k_);
    });
  }

 private:
  int64_t k_;
  int64_t rows_;
  Format format_;
};

const Signature kQuantLinear{QuantLinear::kName, {0, 1, 2, 1, 1}, 1, {1}, 1};
const Signature kRmsNorm{RmsNorm::kName, {1, 1}, 2, {1}, 1};
const Signature kRmsNormQuant{RmsNormQuant::kName, {1, 1}, 2, {3, 1}, 2};
const Signature kEmbedDequant{EmbedDequant::kName, {7, 2}, 2, {1}, 1};

// Code of element i (0..31) of a slice for one lane, from the planes of FORMAT.md.
int slice_code(const uint8_t* slice, int bits, int lane, int i) {
  const int byte = lane * 4 + i % 4;
  if (bits == 8) return slice[i / 4 * 64 + byte];
  const int nibbles = slice[i / 4 % 4 * 64 + byte];
  const int low = i < 16 ? nibbles & 15 : nibbles >> 4;
  if (bits == 4) return low;
  return low | ((slice[256 + i / 4 % 2 * 64 + byte] >> (i / 8 * 2)) & 3) << 4;
}

}  // namespace

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

void decode_row(Format format, const uint8_t* panel, int lane, int64_t k, float* out) {
  const FormatInfo& f = info(format);
  if (f.is_float) {
    for (int64_t i = 0; i < k; ++i) {
      const uint8_t* p = panel + (i * kPanelRows + lane) * (f.bits / 8);
      if (format == Format::kF32) {
        std::memcpy(out + i, p, 4);
      } else {
        out[i] = format == Format::kF16 ? float_from_f16(load_u16(p)) : float_from_bits(static_cast<uint32_t>(load_u16(p)) << 16);
      }
    }
    return;
  }
  const int64_t unit = f.unit == 0 ? k : f.unit;
  float channel = 1.0f;
  if (f.unit == 0) std::memcpy(&channel, panel + k / kSlice * slice_bytes(f.bits) + 4 * lane, 4);
  const uint8_t* p = panel;
  for (int64_t u = 0; u < k; u += unit) {
    float scale = channel, minimum = 0.0f;
    const uint8_t* sub_scales = nullptr;
    const uint8_t* sub_mins = nullptr;
    if (f.unit != 0) {
      scale = float_from_f16(load_u16(p + 2 * lane));
      p += 32;
      if (f.has_min) {
        minimum = float_from_f16(load_u16(p + 2 * lane));
        p += 32;
      }
    }
    if (f.two_level) {
      sub_scales = p;
      p += f.has_min ? 128 : 256;
      if (f.has_min) {
        sub_mins = p;
        p += 128;
      }
    }
    for (int64_t b = 0; b < unit / kSlice; ++b) {
      for (int i = 0; i < kSlice; ++i) {
        const int code = slice_code(p, f.bits, lane, i);
        const int sub = (static_cast<int>(b) * kSlice + i) / f.sub_block;
        float s = scale, m = minimum;
        if (f.two_level) {
          const uint8_t raw = sub_scales[kPanelRows * sub + lane];
          s = scale * static_cast<float>(f.has_min ? static_cast<int>(raw) : static_cast<int>(static_cast<int8_t>(raw)));
          if (f.has_min) m = -(minimum * static_cast<float>(sub_mins[kPanelRows * sub + lane]));
        }
        const float value = s * static_cast<float>(code - f.zero);
        out[u + b * kSlice + i] = f.has_min ? value + m : value;
      }
      p += slice_bytes(f.bits);
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

void register_linear_ops(Registry& registry) {
  static Op<QuantLinear> quant_linear(&kQuantLinear);
  static Op<RmsNorm> rms_norm(&kRmsNorm);
  static Op<RmsNormQuant> rms_norm_quant(&kRmsNormQuant);
  static Op<EmbedDequant> embed_dequant(&kEmbedDequant);
  registry.add(&quant_linear);
  registry.add(&rms_norm);
  registry.add(&rms_norm_quant);
  registry.add(&embed_dequant);
}

}  // namespace stepwell
