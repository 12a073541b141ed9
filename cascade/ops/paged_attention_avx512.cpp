// PagedAttention on AVX-512 (machines with AMX too): 32 registers, 16 of them accumulators.
#include "paged_attention_kernel.h"
#include "vector_avx512.h"

namespace stepwell {
namespace {

struct Avx512Attention : Avx512 {
  static constexpr int kBlockRows = 8, kAccumulators = 16;

  static void transpose(F32 (&rows)[16]) {
    F32 pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    // fours[4 * g + c]: column c of every quarter, rows 4g .. 4g+3.
    for (int i = 0; i < 16; i += 4) {
      fours[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      fours[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      fours[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      fours[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int c = 0; c < 4; ++c) {
      const F32 low_even = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0x88);
      const F32 low_odd = _mm512_shuffle_f32x4(fours[c], fours[c + 4], 0xdd);
      const F32 high_even = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0x88);
      const F32 high_odd = _mm512_shuffle_f32x4(fours[c + 8], fours[c + 12], 0xdd);
      rows[c] = _mm512_shuffle_f32x4(low_even, high_even, 0x88);
      rows[c + 4] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
      rows[c + 8] = _mm512_shuffle_f32x4(low_even, high_even, 0xdd);
      rows[c + 12] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
    }
  }
  static float most(F32 x) { return _mm512_reduce_max_ps(x); }
};

}  // namespace

const AttentionKernels kAttentionAvx512 = attention_of<Avx512Attention>();

}  // namespace stepwell
