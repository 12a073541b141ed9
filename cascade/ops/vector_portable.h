// Sixteen lanes in plain C++: any processor, and the reference that the other ISAs are held against.
// Included only by files compiled for this ISA.
#pragma once

#include <cmath>
#include <cstring>

#include "float16.h"

namespace stepwell {
namespace {

struct Portable {
  struct I32 {
    int32_t v[16];
  };
  struct F32 {
    float v[16];
  };
  struct Line {
    uint8_t v[64];
  };
  static constexpr bool kCentres = false;  // 8-bit codes are multiplied as they are, unsigned
  static constexpr bool kSumsPairs = false;
  static constexpr int kRows = 8;

  template <typename T, typename F>
  static T lanes(F&& f) {
    T out;
    for (int i = 0; i < 16; ++i) out.v[i] = f(i);
    return out;
  }
  template <typename F>
  static Line bytes(F&& f) {
    Line out;
    for (int i = 0; i < 64; ++i) out.v[i] = static_cast<uint8_t>(f(i));
    return out;
  }

  static void prefetch(const uint8_t*) {}
  static I32 zero_i32() { return {}; }
  static F32 zero_f32() { return {}; }
  static I32 set_i32(int32_t x) {
    return lanes<I32>([&](int) { return x; });
  }
  static F32 set_f32(float x) {
    return lanes<F32>([&](int) { return x; });
  }
  static I32 add(I32 a, I32 b) {
    return lanes<I32>([&](int i) { return a.v[i] + b.v[i]; });
  }
  static I32 multiply(I32 a, I32 b) {
    return lanes<I32>([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F32 add(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F32 subtract(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F32 multiply(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F32 divide(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F32 fma(F32 a, F32 b, F32 c) {
    return lanes<F32>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  static F32 negate(F32 a) {
    return lanes<F32>([&](int i) { return -a.v[i]; });
  }
  static F32 absolute(F32 a) {
    return lanes<F32>([&](int i) { return std::fabs(a.v[i]); });
  }
  static F32 max(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F32 min(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F32 to_f32(I32 a) {
    return lanes<F32>([&](int i) { return static_cast<float>(a.v[i]); });
  }
  static I32 round(F32 a, float low, float high) {
    // Adding and taking away 1.5 * 2^23 rounds to nearest even where |a| < 2^22, which the clamp ensures.
    return lanes<I32>([&](int i) {
      const float bounded = a.v[i] > low ? (a.v[i] < high ? a.v[i] : high) : low;
      volatile float shifted = bounded + 12582912.0f;
      return static_cast<int32_t>(shifted - 12582912.0f);
    });
  }
  static F32 scale_by_power(F32 a, I32 n) {
    return lanes<F32>([&](int i) { return a.v[i] * float_from_bits(static_cast<uint32_t>(n.v[i] + 127) << 23); });
  }
  static F32 load_f32(const float* p) {
    return lanes<F32>([&](int i) { return p[i]; });
  }
  static void store_f32(float* p, F32 a) { std::memcpy(p, a.v, 64); }
  static void store_i8(int8_t* p, I32 a) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
  }
  static F32 load_f16(const uint8_t* p) {
    return lanes<F32>([&](int i) { return float_from_f16(load_u16(p + 2 * i)); });
  }
  static F32 load_bf16(const uint8_t* p) {
    return lanes<F32>([&](int i) { return float_from_bits(static_cast<uint32_t>(load_u16(p + 2 * i)) << 16); });
  }
  static I32 load_u8(const uint8_t* p) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(p[i]); });
  }
  static I32 load_i8(const uint8_t* p) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(static_cast<int8_t>(p[i])); });
  }
  static Line load_line(const uint8_t* p) {
    return bytes([&](int i) { return p[i]; });
  }
  static Line low_nibbles(Line a) {
    return bytes([&](int i) { return a.v[i] & 15; });
  }
  static Line high_nibbles(Line a) {
    return bytes([&](int i) { return a.v[i] >> 4; });
  }
  template <int kShift>
  static Line two_bits(Line a) {
    return bytes([&](int i) { return (a.v[i] >> kShift) & 3; });
  }
  static Line add_high_bits(Line low, Line high) {
    return bytes([&](int i) { return low.v[i] | (high.v[i] << 4); });
  }
  template <int kBits>
  static I32 dot(I32 acc, Line codes, int32_t four) {
    int8_t x[4];
    std::memcpy(x, &four, 4);
    return lanes<I32>([&](int i) {
      return acc.v[i] + codes.v[4 * i] * x[0] + codes.v[4 * i + 1] * x[1] + codes.v[4 * i + 2] * x[2] + codes.v[4 * i + 3] * x[3];
    });
  }
  // Two int16 in each lane, and acc + the sum of their products with those in `two`.
  static I32 pair(I32 low, I32 high) {
    return lanes<I32>(
        [&](int i) { return static_cast<int32_t>((static_cast<uint32_t>(low.v[i]) & 0xffffu) | static_cast<uint32_t>(high.v[i]) << 16); });
  }
  static I32 pair_dot(I32 acc, I32 pairs, int32_t two) {
    const auto low = [](int32_t both) { return static_cast<int16_t>(both); };
    const auto high = [](int32_t both) { return static_cast<int16_t>(both >> 16); };
    return lanes<I32>([&](int i) { return acc.v[i] + low(pairs.v[i]) * low(two) + high(pairs.v[i]) * high(two); });
  }
  // Sums of the first and the last 16 of 32 codes.
  static void sum_halves(const int8_t* codes, int16_t* sums) {
    for (int half = 0; half < 2; ++half) {
      int sum = 0;
      for (int i = 0; i < 16; ++i) sum += codes[16 * half + i];
      sums[half] = static_cast<int16_t>(sum);
    }
  }
  static float sum(F32 a) {
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    return a.v[0];
  }
  static void store_f16(uint8_t* p, F32 a) {
    for (int i = 0; i < 16; ++i) store_u16(p + 2 * i, f16_from_float(a.v[i]));
  }
  static void store_bf16(uint8_t* p, F32 a) {
    for (int i = 0; i < 16; ++i) store_u16(p + 2 * i, bf16_from_float(a.v[i]));
  }
};

}  // namespace
}  // namespace stepwell
