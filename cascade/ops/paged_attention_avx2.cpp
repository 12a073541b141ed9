// PagedAttention on AVX2: 16 registers of 8 floats, so 6 accumulators of 16 lanes.
#include "paged_attention_kernel.h"
#include "vector_avx2.h"

namespace stepwell {
namespace {

struct Avx2Attention : Avx2 {
  static constexpr int kBlockRows = 6, kAccumulators = 6;

  static void transpose_eight(__m256 (&m)[8]) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(m[i], m[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(m[i], m[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      m[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
      m[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
  }

  // Four quadrants of 8 x 8, the off-diagonal ones exchanged.
  static void transpose(F32 (&rows)[16]) {
    __m256 quadrants[4][8];
    for (int i = 0; i < 8; ++i) {
      quadrants[0][i] = rows[i].a;
      quadrants[1][i] = rows[i + 8].a;
      quadrants[2][i] = rows[i].b;
      quadrants[3][i] = rows[i + 8].b;
    }
    for (auto& quadrant : quadrants) transpose_eight(quadrant);
    for (int i = 0; i < 8; ++i) {
      rows[i] = {quadrants[0][i], quadrants[1][i]};
      rows[i + 8] = {quadrants[2][i], quadrants[3][i]};
    }
  }
  static float most(F32 x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
  }
};

}  // namespace

const AttentionKernels kAttentionAvx2 = attention_of<Avx2Attention>();

}  // namespace stepwell
