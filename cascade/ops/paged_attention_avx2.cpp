// PagedAttention on AVX2.
#include "paged_attention_kernel.h"
#include "vector_avx2.h"

namespace stepwell {

const AttentionKernels kAttentionAvx2 = attention_of<Avx2>();

}  // namespace stepwell
