// Scaled problems: sums that were made first are multiplied by one factor and rounded once.
#pragma once

#include "conv.h"

namespace convgrad {

// result = round(sums * factor), element by element; the product is a double, exact for floats. `sums` holds f32 or f64,
// and may be the result itself. Extents and strides in bytes are of canonical axes; missing leading ones have extent 1.
void scale(const Tensor& sums, Dtype sums_dtype, const Tensor& result, Dtype dtype, const int64_t (&extent)[5],
           double factor, const Isa& isa, int threads);

}  // namespace convgrad
