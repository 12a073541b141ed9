// The kernels of QuantLinear and its neighbours, written once over a vector type V of 16 lanes.
//
// Each ISA file defines V in an unnamed namespace and takes `kernels_of<V>()`. Nothing here may instantiate code that
// other files share (no std containers): a shared inline function compiled for AVX-512 could be the one the linker
// keeps. V gives: I32, F32 (16 lanes), Line (64 code bytes: 16 rows x 4 k), and the static functions used below.
#pragma once

#include <cstring>

#include "quant_linear.h"

namespace stepwell {
namespace {

constexpr int64_t kPrefetch = 2048;  // bytes ahead

template <class V>
struct Kernels {
  using I32 = typename V::I32;
  using F32 = typename V::F32;
  using Line = typename V::Line;

  // Line g (k = 4g .. 4g+3) of a slice of codes, one code a byte. Cheap enough to do a nibble at a time: it shares no
  // execution port with the products.
  template <int kBits>
  static inline Line line_of(const uint8_t* p, int g) {
    if constexpr (kBits == 8) return V::load_line(p + 64 * g);
    const Line packed = V::load_line(p + 64 * (g % 4));
    const Line low = g < 4 ? V::low_nibbles(packed) : V::high_nibbles(packed);
    if constexpr (kBits == 4) return low;
    const Line plane = V::load_line(p + 256 + 64 * (g % 2));
    switch (g / 2) {
      case 0:
        return V::add_high_bits(low, V::template two_bits<0>(plane));
      case 1:
        return V::add_high_bits(low, V::template two_bits<2>(plane));
      case 2:
        return V::add_high_bits(low, V::template two_bits<4>(plane));
      default:
        return V::add_high_bits(low, V::template two_bits<6>(plane));
    }
  }

  static inline int32_t load_four(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return four;
  }

  // total[r] += weight * lines [kFrom, kTo) of a slice times row r, or the products alone without kWeighed; the codes of
  // the rows lie `stride` apart. Line by line over the rows: a row's sum is a chain of products, R chains side by side
  // keep the multipliers busy.
  template <int kBits, int kFrom, int kTo, bool kWeighed, int R>
  static inline void add_dot(I32 (&total)[R], const uint8_t* p, const int8_t* x, int64_t stride, I32 weight) {
    if constexpr (V::kSumsPairs && kBits < 8) {
      // Products in pairs fill int16; so many lines of them add up before they have to be widened.
      constexpr int kLines = 32767 / (2 * 127 * ((1 << kBits) - 1));
      const I32 weights = V::pair(weight, weight);
      typename V::I16 sums[R];
#pragma GCC unroll 8
      for (int g = kFrom; g < kTo; ++g) {
        const Line codes = line_of<kBits>(p, g);
        for (int r = 0; r < R; ++r) {
          const typename V::I16 pairs = V::pair_products(codes, load_four(x + r * stride + 4 * g));
          sums[r] = (g - kFrom) % kLines == 0 ? pairs : V::add(sums[r], pairs);
        }
        if ((g + 1 - kFrom) % kLines == 0 || g + 1 == kTo)
          for (int r = 0; r < R; ++r) total[r] = V::add_weighed(total[r], sums[r], weights);
      }
    } else {
      I32 fresh[R];
      I32(&sums)[R] = kWeighed ? fresh : total;
      if constexpr (kWeighed)
        for (int r = 0; r < R; ++r) fresh[r] = V::zero_i32();
#pragma GCC unroll 8
      for (int g = kFrom; g < kTo; ++g) {
        const Line codes = line_of<kBits>(p, g);
        for (int r = 0; r < R; ++r) sums[r] = V::template dot<kBits>(sums[r], codes, load_four(x + r * stride + 4 * g));
      }
      if constexpr (kWeighed)
        for (int r = 0; r < R; ++r) total[r] = V::add(total[r], V::multiply(fresh[r], weight));
    }
  }

  // Adds weights[i][lane] * sums[i] of every row, i in [0, count), two at a time as int16: a sub-scale or sub-minimum has
  // 8 bits, a sum of 32 codes 13.
  template <bool kSigned, int R>
  static inline void weigh(I32 (&low)[R], const uint8_t* weights, const int16_t* sums, int64_t stride, int64_t count) {
    const auto load = [](const uint8_t* p) { return kSigned ? V::load_i8(p) : V::load_u8(p); };
    for (int64_t i = 0; i + 1 < count; i += 2) {
      const I32 pair = V::pair(load(weights + 16 * i), load(weights + 16 * i + 16));
      for (int r = 0; r < R; ++r) low[r] = V::pair_dot(low[r], pair, load_pair(sums + r * stride + i));
    }
    if (count % 2 != 0) {  // a step of one slice
      const I32 last = load(weights + 16 * (count - 1));
      for (int r = 0; r < R; ++r) low[r] = V::add(low[r], V::multiply(last, V::set_i32(sums[r * stride + count - 1])));
    }
  }

  static inline int32_t load_pair(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return pair;
  }

  template <Format F, int R>
  static void panel_rows(const uint8_t* p, const Activations& x, int64_t first, float* out) {
    constexpr FormatInfo f = info(F);
    const int64_t slices = x.k / kSlice;
    const int64_t unit = f.unit == 0 ? slices : f.unit / kSlice;
    const int64_t group = x.group / kSlice;
    const int64_t longest = unit < kUnit / kSlice ? unit : kUnit / kSlice;
    const int64_t step = group < longest ? group : longest;
    const int64_t groups = slices / group;
    const int8_t* codes_of = x.codes + first * x.k;
    const int16_t* halves_of = x.half_sums + first * 2 * slices;
    const int16_t* sums_of = x.sums + first * slices;
    const float* scales_of = x.scales + first * groups;
    F32 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = V::zero_f32();

    for (int64_t u = 0; u < slices; u += unit) {
      F32 scale = V::zero_f32(), minimum = V::zero_f32();
      const uint8_t* sub_scales = nullptr;
      const uint8_t* sub_mins = nullptr;
      if constexpr (f.unit != 0) {
        scale = V::load_f16(p);
        p += 32;
        if constexpr (f.has_min) {
          minimum = V::load_f16(p);
          if constexpr (f.two_level) minimum = V::negate(minimum);
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
        const int64_t taken = f.unit == 0 && unit - v < step ? unit - v : step;
        I32 total[R];
        for (int r = 0; r < R; ++r) total[r] = V::zero_i32();
        for (int64_t b = v; b < v + taken; ++b) {
          for (int64_t line = 0; line < slice_bytes(f.bits); line += 64) V::prefetch(p + kPrefetch + line);
          const int8_t* xs = codes_of + (u + b) * kSlice;
          if constexpr (f.sub_block == 16) {
            add_dot<f.bits, 0, 4, true>(total, p, xs, x.k, V::load_i8(sub_scales + 32 * b));
            add_dot<f.bits, 4, 8, true>(total, p, xs, x.k, V::load_i8(sub_scales + 32 * b + 16));
          } else if constexpr (f.two_level) {
            add_dot<f.bits, 0, 8, true>(total, p, xs, x.k, V::load_u8(sub_scales + 16 * b));
          } else {
            add_dot<f.bits, 0, 8, false>(total, p, xs, x.k, V::set_i32(1));
          }
          p += slice_bytes(f.bits);
        }
        // What the zero point or the minimum adds needs the sums of the rows' codes only.
        I32 low[R];
        if constexpr (f.two_level) {
          for (int r = 0; r < R; ++r) low[r] = V::zero_i32();
          if constexpr (f.sub_block == 16) {
            weigh<true>(low, sub_scales + 32 * v, halves_of + 2 * (u + v), 2 * slices, 2 * taken);
          } else {
            weigh<false>(low, sub_mins + 16 * v, sums_of + u + v, slices, taken);
          }
        } else {
          for (int r = 0; r < R; ++r) {
            int32_t sum = 0;
            for (int64_t b = 0; b < taken; ++b) sum += sums_of[r * slices + u + v + b];
            low[r] = V::set_i32(sum);
          }
        }
        if constexpr (!f.has_min && !(f.bits == 8 && V::kCentres))
          for (int r = 0; r < R; ++r) total[r] = V::add(total[r], V::multiply(low[r], V::set_i32(-f.zero)));
        if (groups > 1) {
          for (int r = 0; r < R; ++r) {
            const F32 xs = V::set_f32(scales_of[r * groups + (u + v) / group]);
            acc[r] = V::fma(V::to_f32(total[r]), f.unit == 0 ? xs : V::multiply(scale, xs), acc[r]);
            if constexpr (f.has_min) acc[r] = V::fma(V::to_f32(low[r]), V::multiply(minimum, xs), acc[r]);
          }
        } else {
          for (int r = 0; r < R; ++r) {
            const F32 product = V::to_f32(total[r]);
            acc[r] = f.unit == 0 ? V::add(product, acc[r]) : V::fma(product, scale, acc[r]);
            if constexpr (f.has_min) acc[r] = V::fma(V::to_f32(low[r]), minimum, acc[r]);
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) V::store_f32(out + r * kPanelRows, acc[r]);
  }

  template <Format F, int R>
  static void float_rows(const uint8_t* p, const Activations& x, int64_t first, float* out) {
    F32 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = V::zero_f32();
    for (int64_t k = 0; k < x.k; ++k) {
      F32 w;
      if constexpr (F == Format::kF16) w = V::load_f16(p + 32 * k);
      if constexpr (F == Format::kBf16) w = V::load_bf16(p + 32 * k);
      if constexpr (F == Format::kF32) w = V::load_f32(reinterpret_cast<const float*>(p + 64 * k));
      for (int r = 0; r < R; ++r) acc[r] = V::fma(w, V::set_f32(x.floats[(first + r) * x.k + k]), acc[r]);
    }
    for (int r = 0; r < R; ++r) V::store_f32(out + r * kPanelRows, acc[r]);
  }

  template <Format F, int R>
  static void rows(const uint8_t* panel, const Activations& x, int64_t first, float* out) {
    if constexpr (info(F).is_float)
      float_rows<F, R>(panel, x, first, out);
    else
      panel_rows<F, R>(panel, x, first, out);
  }

  // As many rows side by side as the ISA has registers for.
  template <Format F>
  static void count_rows(const uint8_t* panel, const Activations& x, int64_t first, int count, float* out) {
    for (; count > V::kRows; count -= V::kRows, first += V::kRows, out += V::kRows * kPanelRows) rows<F, V::kRows>(panel, x, first, out);
    last_rows<F, V::kRows>(panel, x, first, count, out);
  }
  template <Format F, int R>
  static void last_rows(const uint8_t* panel, const Activations& x, int64_t first, int count, float* out) {
    if constexpr (R > 1)
      if (count < R) return last_rows<F, R - 1>(panel, x, first, count, out);
    rows<F, R>(panel, x, first, out);
  }

  static void panel(Format format, const uint8_t* panel, const Activations& x, int64_t first, int count, float* out) {
    switch (format) {
      case Format::kQ4:
        return count_rows<Format::kQ4>(panel, x, first, count, out);
      case Format::kQ4m:
        return count_rows<Format::kQ4m>(panel, x, first, count, out);
      case Format::kQ6s:
        return count_rows<Format::kQ6s>(panel, x, first, count, out);
      case Format::kQ6m:
        return count_rows<Format::kQ6m>(panel, x, first, count, out);
      case Format::kQ8:
        return count_rows<Format::kQ8>(panel, x, first, count, out);
      case Format::kQ4k:
        return count_rows<Format::kQ4k>(panel, x, first, count, out);
      case Format::kQ6k2:
        return count_rows<Format::kQ6k2>(panel, x, first, count, out);
      case Format::kQ6k:
        return count_rows<Format::kQ6k>(panel, x, first, count, out);
      case Format::kC8:
        return count_rows<Format::kC8>(panel, x, first, count, out);
      case Format::kF16:
        return count_rows<Format::kF16>(panel, x, first, count, out);
      case Format::kBf16:
        return count_rows<Format::kBf16>(panel, x, first, count, out);
      case Format::kF32:
        return count_rows<Format::kF32>(panel, x, first, count, out);
    }
  }

  static void quantize(const float* x, int64_t k, int64_t group, int planes, int8_t* codes, float* scales) {
    const int64_t groups = k / group;
    for (int64_t g = 0; g < groups; ++g) {
      const float* from = x + g * group;
      int8_t* to = codes + g * group;
      F32 most = V::zero_f32(), poison = V::zero_f32();
      for (int64_t i = 0; i < group; i += 16) {
        const F32 v = V::load_f32(from + i);
        most = V::max(most, V::absolute(v));
        poison = V::fma(v, V::zero_f32(), poison);  // NaN once a lane has met a NaN, which a maximum may lose, or an infinity
      }
      float lanes[16], poisoned[16];
      V::store_f32(lanes, most);
      V::store_f32(poisoned, poison);
      float a = 0;
      bool finite = true;
      for (int i = 0; i < 16; ++i) {
        a = lanes[i] > a ? lanes[i] : a;
        finite = finite && poisoned[i] == 0.0f;
      }
      const float scale = a / 127.0f;
      // A group of denormals has no finite inverse scale: it is zero at this precision.
      const bool empty = scale < 1e-37f;
      scales[g] = !finite ? __builtin_nanf("") : empty ? 0.0f : scale;
      if (planes == 2) scales[groups + g] = scales[g] / 254.0f;
      if (!finite || empty) {
        std::memset(to, 0, static_cast<size_t>(group));
        if (planes == 2) std::memset(to + k, 0, static_cast<size_t>(group));
        continue;
      }
      const F32 inverse = V::set_f32(127.0f / a);
      for (int64_t i = 0; i < group; i += 16) {
        const F32 scaled = V::multiply(V::load_f32(from + i), inverse);
        const I32 coarse = V::round(scaled, -127.0f, 127.0f);
        V::store_i8(to + i, coarse);
        if (planes == 2) {
          const F32 rest = V::multiply(V::subtract(scaled, V::to_f32(coarse)), V::set_f32(254.0f));
          V::store_i8(to + k + i, V::round(rest, -127.0f, 127.0f));
        }
      }
    }
  }

  static void sum_codes(const int8_t* codes, int64_t k, int16_t* half_sums, int16_t* sums) {
    for (int64_t i = 0; i < k / kSlice; ++i) {
      V::sum_halves(codes + i * kSlice, half_sums + 2 * i);
      sums[i] = static_cast<int16_t>(half_sums[2 * i] + half_sums[2 * i + 1]);
    }
  }

  static void rms_norm(const float* x, const float* gamma, int64_t k, float epsilon, float* out) {
    F32 squares = V::zero_f32();
    for (int64_t i = 0; i < k; i += 16) {
      const F32 v = V::load_f32(x + i);
      squares = V::fma(v, v, squares);
    }
    float lanes[16];
    V::store_f32(lanes, squares);
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    const float inverse = 1.0f / __builtin_sqrtf(lanes[0] / static_cast<float>(k) + epsilon);
    const F32 factor = V::set_f32(inverse);
    for (int64_t i = 0; i < k; i += 16) V::store_f32(out + i, V::multiply(V::multiply(V::load_f32(x + i), factor), V::load_f32(gamma + i)));
  }

  // exp(x) for x <= 88, 0 below -87: 2^n * p(r) with r in [-ln2/2, ln2/2], a degree-6 polynomial, within 2 ulp.
  static inline F32 exponential(F32 x) {
    x = V::min(V::max(x, V::set_f32(-87.0f)), V::set_f32(88.0f));
    const I32 n = V::round(V::multiply(x, V::set_f32(1.44269504f)), -127.0f, 127.0f);
    const F32 whole = V::to_f32(n);
    F32 r = V::fma(whole, V::set_f32(-0.693359375f), x);
    r = V::fma(whole, V::set_f32(2.12194440e-4f), r);
    F32 p = V::set_f32(1.38888889e-3f);
    p = V::fma(p, r, V::set_f32(8.33333333e-3f));
    p = V::fma(p, r, V::set_f32(4.16666667e-2f));
    p = V::fma(p, r, V::set_f32(1.66666667e-1f));
    p = V::fma(p, r, V::set_f32(0.5f));
    p = V::fma(p, r, V::set_f32(1.0f));
    p = V::fma(p, r, V::set_f32(1.0f));
    return V::scale_by_power(p, n);
  }

  static inline F32 swiglu(F32 gate, F32 up) {
    const F32 silu = V::divide(gate, V::add(V::set_f32(1.0f), exponential(V::negate(gate))));
    return V::multiply(silu, up);
  }

  // One row's product: the planes' sums, scaled and added.
  static inline F32 scaled(const Sums& s, int64_t row) {
    const auto plane = [&s](int64_t at) {
      F32 sum = V::load_f32(s.sums + at * kPanelRows);
      if (s.row_scales != nullptr) sum = V::multiply(sum, V::set_f32(s.row_scales[at]));
      return s.channel == nullptr ? sum : V::multiply(sum, V::load_f32(s.channel));
    };
    return s.planes == 1 ? plane(row) : V::add(plane(2 * row), plane(2 * row + 1));
  }

  static inline F32 load_some(const float* p, int width) {
    if (width == kPanelRows) return V::load_f32(p);
    float lanes[kPanelRows] = {};
    std::memcpy(lanes, p, static_cast<size_t>(width) * sizeof(float));
    return V::load_f32(lanes);
  }

  static void finish(const Epilogue& e, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      F32 y = scaled(e.x, row);
      if (e.bias != nullptr) y = V::add(y, load_some(e.bias, e.width));
      if (e.gates.sums != nullptr) y = swiglu(scaled(e.gates, row), y);
      if (e.residual != nullptr) y = V::add(y, load_some(e.residual + row * e.stride, e.width));
      if (e.width == kPanelRows) {
        V::store_f32(e.out + row * e.stride, y);
      } else {
        float lanes[kPanelRows];
        V::store_f32(lanes, y);
        std::memcpy(e.out + row * e.stride, lanes, static_cast<size_t>(e.width) * sizeof(float));
      }
    }
  }
};

template <class V>
constexpr LinearKernels kernels_of() {
  return {Kernels<V>::panel, Kernels<V>::finish, Kernels<V>::quantize, Kernels<V>::sum_codes, Kernels<V>::rms_norm, nullptr};
}

}  // namespace
}  // namespace stepwell
