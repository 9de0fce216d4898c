// What XLA calls inside a compiled JAX program: a native plan on the CPU, a prepared call on a GPU.
#pragma once

#include <nanobind/nanobind.h>

namespace convgrad {

// Adds `xla_handlers`, capsules by platform; empty where the module was built without jaxlib's headers.
void bind_xla(nanobind::module_& module);

}  // namespace convgrad
