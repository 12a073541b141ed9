// PagedAttention on AVX-512 VNNI.
#include "paged_attention_kernel.h"
#include "vector_avx512.h"

namespace stepwell {

const AttentionKernels kAttentionAvx512 = attention_of<Avx512>();

}  // namespace stepwell
