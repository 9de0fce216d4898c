// What Python sees of prepared GPU calls.
#pragma once

#include <nanobind/nanobind.h>

namespace convgrad::gpu {

void bind(nanobind::module_& module);

}  // namespace convgrad::gpu
