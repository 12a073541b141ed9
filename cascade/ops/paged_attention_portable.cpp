// PagedAttention on any processor.
#include "paged_attention_kernel.h"
#include "vector_portable.h"

namespace stepwell {

const AttentionKernels kAttentionPortable = attention_of<Portable>();

}  // namespace stepwell
