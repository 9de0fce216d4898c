// The only file of the native core that knows Python.
#include <nanobind/nanobind.h>

NB_MODULE(_native, module) { module.attr("abi") = 1; }
