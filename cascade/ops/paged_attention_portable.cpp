// PagedAttention on any processor.
#include "paged_attention_kernel.h"
#include "vector_portable.h"

namespace stepwell {
namespace {

struct PortableAttention : Portable {
  static constexpr int kBlockRows = 2, kAccumulators = 4;

  static void transpose(F32 (&rows)[16]) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < i; ++j) {
        const float other = rows[i].v[j];
        rows[i].v[j] = rows[j].v[i];
        rows[j].v[i] = other;
      }
    }
  }
  static float most(F32 x) {
    float top = x.v[0];
    for (int i = 1; i < 16; ++i) top = x.v[i] > top ? x.v[i] : top;
    return top;
  }
};

}  // namespace

const AttentionKernels kAttentionPortable = attention_of<PortableAttention>();

}  // namespace stepwell
