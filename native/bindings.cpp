// What Python sees of the native core. Only this file, bound_plan.h, bindings_torch.cpp, xla_handlers.cpp and gpu/gpu_bindings.cpp
// know Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>

#include "bindings_torch.h"
#include "bound_plan.h"
#include "ceilings.h"
#include "gpu/gpu_bindings.h"
#include "plan_numbers.h"
#include "scale.h"
#include "threads.h"
#include "torch_team.h"
#include "xla_handlers.h"

namespace nb = nanobind;

namespace convgrad {
namespace {

BoundPlan make_plan(const std::vector<int64_t>& numbers, int axes, nb::object dtype, nb::object out_dtype) {
  if (numbers.size() != plan_numbers) throw nb::value_error("a plan needs as many numbers as plan_numbers.h says");
  return BoundPlan(problem_from(numbers.data(), get_threads()), axes, std::move(dtype), std::move(out_dtype));
}

// result = round(sums * factor): arrays of one shape of up to five axes, types of sums and result.
void scale_sums(nb::handle sums, nb::handle result, std::array<int, 2> types, double factor, int threads) {
  const ArrayHead &from = as_array(sums.ptr(), "sums"), &to = as_array(result.ptr(), "result");
  int64_t extent[5] = {1, 1, 1, 1, 1};
  Tensor source, target;
  source.data = from.data;
  target.data = to.data;
  bool fits = from.nd == to.nd && to.nd <= 5;
  for (int axis = 0; fits && axis < to.nd; ++axis) {
    fits = from.dimensions[axis] == to.dimensions[axis];
    extent[axis] = to.dimensions[axis];
    source.stride[axis] = from.strides[axis];
    target.stride[axis] = to.strides[axis];
  }
  if (!fits) throw nb::value_error("sums and result must have one shape of up to five axes");
  nb::gil_scoped_release released;
  scale(source, Dtype(types[0]), target, Dtype(types[1]), extent, factor, current_isa(), std::min(threads, max_threads));
}

// run(operands, results, workspace), with the plans' loops on the threads of the torch that is loaded.
void run_on_torch_team(nb::handle run, nb::handle operands, nb::handle results, nb::handle workspace) {
  const ExecutorScope scope(torch_team());
  run(operands, results, workspace);
}

}  // namespace
}  // namespace convgrad

NB_MODULE(_native, module) {
  using namespace convgrad;
  array_type = reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").inc_ref().ptr());
  main_thread = nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  byte_type = nb::module_::import_("numpy").attr("dtype")("uint8").release();
  nb::class_<BoundPlan>(module, "Plan")
      .def("run", &BoundPlan::run, nb::arg("operands"), nb::arg("results"), nb::arg("workspace").none() = nb::none())
      .def_prop_ro("kernel", &BoundPlan::kernel)
      .def_prop_ro("seconds", &BoundPlan::seconds)
      .def_prop_ro("threads", &BoundPlan::threads)
      .def_prop_ro("workspace_bytes", &BoundPlan::workspace_bytes)
      .def_prop_ro("notes", &BoundPlan::notes);
  module.def("plan", &make_plan);
  module.def("scale", &scale_sums);
  module.def("isa", [] { return std::string(current_isa().name); });
  module.def("isa_available", [](const std::string& name) { return find_isa(name.c_str()) != nullptr; });
  module.def("set_num_threads", &set_threads);
  module.def("get_num_threads", &get_threads);
  module.def("threads_for_torch", &threads_for_torch);
  module.def("torch_team", [] { return std::string(torch_team_name()); });
  module.def("prefer_gomp", &prefer_gomp);
  module.def("run_on_torch_team", &run_on_torch_team, nb::arg("run"), nb::arg("operands"), nb::arg("results"),
             nb::arg("workspace").none());
  bind_torch(module);
  // (f32 flops, bf16 flops, copied bytes) per second, and with which instructions
  module.def("measure_ceilings", [](int threads) {
    Ceilings found;
    {
      nb::gil_scoped_release released;
      found = measure_ceilings(threads < 1 ? get_threads() : threads);
    }
    const std::string how = std::string(found.f32_instructions) + ", " + found.bf16_instructions + ", copies";
    return nb::make_tuple(found.f32_flops, found.bf16_flops, found.copy_bytes, how);
  });
  module.def("run_products", &run_products, nb::call_guard<nb::gil_scoped_release>());
  gpu::bind(module);
  bind_xla(module);
  nb::set_leak_warnings(false);  // compiled GPU kernels are kept until the process ends
}
