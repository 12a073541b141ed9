// Sixteen lanes as two AVX2 registers. vpmaddubsw adds two products in int16, which holds codes of up to 6 bits
// (63 * 127 * 2), and an 8-bit code less 128, so that nothing saturates.
// Included only by files compiled for this ISA.
#pragma once

#include <immintrin.h>

#include "float16.h"

namespace stepwell {
namespace {

struct Avx2 {
  struct I32 {
    __m256i a, b;
  };
  struct F32 {
    __m256 a, b;
  };
  struct Line {
    __m256i a, b;
  };

  struct I16 {  // 32 of them, two for each lane
    __m256i a, b;
  };
  static constexpr bool kSumsPairs = true;
  static constexpr bool kCentres = true;  // 8-bit codes are multiplied less 128, their zero in all formats
  static constexpr int kRows = 4;         // a row's sums take two of the sixteen registers

  static __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m128i load_64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }

  static void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
  static I32 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static F32 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static I32 set_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static F32 set_f32(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static I32 add(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static I32 multiply(I32 x, I32 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
  static F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F32 subtract(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F32 multiply(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F32 divide(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static F32 negate(F32 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign)};
  }
  static F32 absolute(F32 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  static F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static F32 to_f32(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static I32 round(F32 x, float low, float high) {
    const F32 bounded = min(max(x, set_f32(low)), set_f32(high));
    return {_mm256_cvtps_epi32(bounded.a), _mm256_cvtps_epi32(bounded.b)};
  }
  static F32 scale_by_power(F32 x, I32 n) {
    const I32 biased = add(n, set_i32(127));
    return multiply(x, F32{_mm256_castsi256_ps(_mm256_slli_epi32(biased.a, 23)), _mm256_castsi256_ps(_mm256_slli_epi32(biased.b, 23))});
  }
  static F32 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store_f32(float* p, F32 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static void store_i8(int8_t* p, I32 x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  static F32 load_f16(const uint8_t* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 16))}; }
  static F32 load_bf16(const uint8_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p + 16)), 16))};
  }
  static I32 load_u8(const uint8_t* p) { return {_mm256_cvtepu8_epi32(load_64(p)), _mm256_cvtepu8_epi32(load_64(p + 8))}; }
  static I32 load_i8(const uint8_t* p) { return {_mm256_cvtepi8_epi32(load_64(p)), _mm256_cvtepi8_epi32(load_64(p + 8))}; }
  static Line load_line(const uint8_t* p) { return {load_256(p), load_256(p + 32)}; }
  static Line mask(Line x, int8_t bits) {
    const __m256i m = _mm256_set1_epi8(bits);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
  }
  static Line low_nibbles(Line x) { return mask(x, 15); }
  static Line high_nibbles(Line x) { return mask({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}, 15); }
  template <int kShift>
  static Line two_bits(Line x) {
    return mask({_mm256_srli_epi16(x.a, kShift), _mm256_srli_epi16(x.b, kShift)}, 3);
  }
  static Line add_high_bits(Line low, Line high) {
    return {_mm256_or_si256(low.a, _mm256_slli_epi16(high.a, 4)), _mm256_or_si256(low.b, _mm256_slli_epi16(high.b, 4))};
  }
  // acc + (codes - 128) . four: the larger factor unsigned, the sign with the other, so that a pair holds in int16.
  template <int kBits>
  static I32 dot(I32 acc, Line codes, int32_t four) {
    static_assert(kBits == 8);
    const __m256i x = _mm256_set1_epi32(four);
    const auto half = [x](__m256i unsigned_codes) {
      const __m256i w = _mm256_xor_si256(unsigned_codes, _mm256_set1_epi8(-128));
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
      return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    };
    return add(acc, I32{half(codes.a), half(codes.b)});
  }
  // Products of codes of up to 6 bits with four signed bytes, added in pairs; sums of them; and acc + what two int16 a
  // lane come to, each times its weight.
  static I16 pair_products(Line codes, int32_t four) {
    const __m256i x = _mm256_set1_epi32(four);
    return {_mm256_maddubs_epi16(codes.a, x), _mm256_maddubs_epi16(codes.b, x)};
  }
  static I16 add(I16 x, I16 y) {
    I16 sum = {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
    // Here and now: GCC would first make all products of a chain, in registers that there are not, and then add.
    asm("" : "+x"(sum.a), "+x"(sum.b));
    return sum;
  }
  static I32 add_weighed(I32 acc, I16 sums, I32 weights) {
    return add(acc, I32{_mm256_madd_epi16(sums.a, weights.a), _mm256_madd_epi16(sums.b, weights.b)});
  }
  // Two int16 in each lane, and acc + the sum of their products with those in `two`.
  static I32 pair(I32 low, I32 high) {
    return {_mm256_blend_epi16(low.a, _mm256_slli_epi32(high.a, 16), 0xaa), _mm256_blend_epi16(low.b, _mm256_slli_epi32(high.b, 16), 0xaa)};
  }
  static I32 pair_dot(I32 acc, I32 pairs, int32_t two) {
    const __m256i both = _mm256_set1_epi32(two);
    return add(acc, I32{_mm256_madd_epi16(pairs.a, both), _mm256_madd_epi16(pairs.b, both)});
  }
  // Sums of the first and the last 16 of 32 codes.
  static void sum_halves(const int8_t* codes, int16_t* sums) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), load_256(codes));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
    const __m256i halves = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
    sums[0] = static_cast<int16_t>(_mm_cvtsi128_si32(_mm256_castsi256_si128(halves)));
    sums[1] = static_cast<int16_t>(_mm_cvtsi128_si32(_mm256_extracti128_si256(halves, 1)));
  }
  // Lanes 8, 4, 2 and 1 apart, as everywhere.
  static float sum(F32 x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
  static void store_f16(uint8_t* p, F32 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_cvtps_ph(x.b, 0));
  }
  static void store_bf16(uint8_t* p, F32 x) {
    float lanes[16];
    store_f32(lanes, x);
    for (int i = 0; i < 16; ++i) store_u16(p + 2 * i, bf16_from_float(lanes[i]));
  }
};

}  // namespace
}  // namespace stepwell
