// QuantLinear on AVX2.
#include "quant_linear_kernel.h"
#include "vector_avx2.h"

namespace stepwell {

const LinearKernels kLinearAvx2 = kernels_of<Avx2>();

}  // namespace stepwell
