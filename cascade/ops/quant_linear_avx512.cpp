// QuantLinear on AVX-512 VNNI.
#include "quant_linear_kernel.h"
#include "vector_avx512.h"

namespace stepwell {

const LinearKernels kLinearAvx512 = kernels_of<Avx512>();

}  // namespace stepwell
