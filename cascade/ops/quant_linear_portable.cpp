// QuantLinear on any processor.
#include "quant_linear_kernel.h"
#include "vector_portable.h"

namespace stepwell {

const LinearKernels kLinearPortable = kernels_of<Portable>();

}  // namespace stepwell
