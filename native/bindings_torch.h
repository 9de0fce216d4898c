// The kernel of aten::convolution_backward that `convgrad.torch.install()` registers.
#pragma once

#include <nanobind/nanobind.h>

namespace convgrad {

void bind_torch(nanobind::module_& module);

}  // namespace convgrad
