// Sixteen lanes in one AVX-512 register; vpdpbusd multiplies 16 rows x 4 k of codes at once.
// Included only by files compiled for this ISA.
#pragma once

#include <immintrin.h>

#include "float16.h"

namespace stepwell {
namespace {

struct Avx512 {
  using I32 = __m512i;
  using F32 = __m512;
  using Line = __m512i;
  static constexpr bool kCentres = false;    // 8-bit codes are multiplied as they are, unsigned
  static constexpr bool kSumsPairs = false;  // vpdpbusd adds up in int32
  static constexpr int kRows = 8;

  static void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
  static I32 zero_i32() { return _mm512_setzero_si512(); }
  static F32 zero_f32() { return _mm512_setzero_ps(); }
  static I32 set_i32(int32_t x) { return _mm512_set1_epi32(x); }
  static F32 set_f32(float x) { return _mm512_set1_ps(x); }
  static I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
  static I32 multiply(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
  static F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  static F32 subtract(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
  static F32 multiply(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  static F32 divide(F32 a, F32 b) { return _mm512_div_ps(a, b); }
  static F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
  static F32 negate(F32 a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static F32 absolute(F32 a) { return _mm512_abs_ps(a); }
  static F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
  static F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
  static F32 to_f32(I32 a) { return _mm512_cvtepi32_ps(a); }
  static I32 round(F32 a, float low, float high) {
    return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(a, _mm512_set1_ps(low)), _mm512_set1_ps(high)));
  }
  static F32 scale_by_power(F32 a, I32 n) {
    return _mm512_mul_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)));
  }
  static F32 load_f32(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f32(float* p, F32 a) { _mm512_storeu_ps(p, a); }
  static void store_i8(int8_t* p, I32 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
  static F32 load_f16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F32 load_bf16(const uint8_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static I32 load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static I32 load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Line load_line(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static Line low_nibbles(Line a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static Line high_nibbles(Line a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
  template <int kShift>
  static Line two_bits(Line a) {
    return _mm512_and_si512(_mm512_srli_epi16(a, kShift), _mm512_set1_epi8(3));
  }
  static Line add_high_bits(Line low, Line high) { return _mm512_or_si512(low, _mm512_slli_epi16(high, 4)); }
  template <int kBits>
  static I32 dot(I32 acc, Line codes, int32_t four) {
    return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(four));
  }
  // Two int16 in each lane, and acc + the sum of their products with those in `two`.
  static I32 pair(I32 low, I32 high) { return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(high, 16)); }
  static I32 pair_dot(I32 acc, I32 pairs, int32_t two) { return _mm512_dpwssd_epi32(acc, pairs, _mm512_set1_epi32(two)); }
  // Sums of the first and the last 16 of 32 codes.
  static void sum_halves(const int8_t* codes, int16_t* sums) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), x);
    const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
    const __m256i halves = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e));
    sums[0] = static_cast<int16_t>(_mm_cvtsi128_si32(_mm256_castsi256_si128(halves)));
    sums[1] = static_cast<int16_t>(_mm_cvtsi128_si32(_mm256_extracti128_si256(halves, 1)));
  }
  // Lanes 8, 4, 2 and 1 apart, as everywhere.
  static float sum(F32 x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
  static void store_f16(uint8_t* p, F32 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, 0)); }
  static void store_bf16(uint8_t* p, F32 x) {
    float lanes[16];
    store_f32(lanes, x);
    for (int i = 0; i < 16; ++i) store_u16(p + 2 * i, bf16_from_float(lanes[i]));
  }
};

}  // namespace
}  // namespace stepwell
