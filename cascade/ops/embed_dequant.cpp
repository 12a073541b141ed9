// EmbedDequant: rows out of the same panels that the head multiplies, so that tied embeddings are stored once.
#include <array>
#include <cstring>

#include "float16.h"
#include "library.h"
#include "op.h"
#include "quant_linear.h"

namespace stepwell {
namespace {

// Code of element i (0..31) of a slice for one lane, from the planes of FORMAT.md.
int slice_code(const uint8_t* slice, int bits, int lane, int i) {
  const int byte = lane * 4 + i % 4;
  if (bits == 8) return slice[i / 4 * 64 + byte];
  const int nibbles = slice[i / 4 % 4 * 64 + byte];
  const int low = i < 16 ? nibbles & 15 : nibbles >> 4;
  if (bits == 4) return low;
  return low | ((slice[256 + i / 4 % 2 * 64 + byte] >> (i / 8 * 2)) & 3) << 4;
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

const Signature kEmbedDequant{EmbedDequant::kName, {7, 2}, 2, {1}, 1};

}  // namespace

void register_embed_dequant(Registry& registry) {
  static Op<EmbedDequant> op(&kEmbedDequant);
  registry.add(&op);
}

}  // namespace stepwell
