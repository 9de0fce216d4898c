// The only file of the native core that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>

#include "ceilings.h"
#include "conv.h"
#include "scale.h"
#include "scratch.h"
#include "threads.h"
#include "torch_team.h"

namespace nb = nanobind;

namespace convgrad {
namespace {

// The head of NumPy's array object. Its first fields have not changed since NumPy 1.0 and are what the public macros
// PyArray_DATA, _NDIM, _DIMS and _STRIDES read; reading them here keeps a call at two microseconds and covers the
// dtypes (bfloat16, float8) that the buffer protocol and DLPack refuse.
struct ArrayHead {
  PyObject_HEAD
  char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
};

PyTypeObject* array_type = nullptr;

const ArrayHead& as_array(PyObject* object, const char* name) {
  if (!PyObject_TypeCheck(object, array_type)) {
    const std::string message = std::string(name) + " must be a numpy.ndarray, got " + Py_TYPE(object)->tp_name;
    throw nb::type_error(message.c_str());
  }
  return *reinterpret_cast<const ArrayHead*>(object);
}

class BoundPlan {
 public:
  BoundPlan(const Problem& problem, int axes) : problem_(problem), axes_(axes), plan_(choose_plan(problem)) {}

  // operands: grad_output, input, weight (those that are needed); results: in the order of wrt.
  void run(nb::handle operands, nb::handle results, nb::handle workspace) const {
    const unsigned wrt = problem_.wrt;
    Arguments arguments;
    Py_ssize_t at = 0;
    const Geometry& g = problem_.geo;
    const int64_t x[5] = {g.N, g.C, g.in[0], g.in[1], g.in[2]}, y[5] = {g.N, g.K, g.out[0], g.out[1], g.out[2]};
    const int64_t w[5] = {g.K, g.group_in(), g.kernel[0], g.kernel[1], g.kernel[2]}, db[5] = {g.K, 1, 1, 1, 1};
    if (wrt & (wrt_input | wrt_weight | wrt_bias)) arguments.y = tensor(operands, at++, "grad_output", y, axes_ + 2);
    if (wrt & (wrt_output | wrt_weight)) arguments.x = tensor(operands, at++, "input", x, axes_ + 2);
    if (wrt & (wrt_output | wrt_input)) arguments.w = tensor(operands, at++, "weight", w, axes_ + 2);
    expect(operands, "operands", at);
    at = 0;
    if (wrt & wrt_output) arguments.y = tensor(results, at++, "the output", y, axes_ + 2);
    if (wrt & wrt_input) arguments.x = tensor(results, at++, "the input gradient", x, axes_ + 2);
    if (wrt & wrt_weight) arguments.w = tensor(results, at++, "the weight gradient", w, axes_ + 2);
    if (wrt & wrt_bias) arguments.db = tensor(results, at++, "the bias gradient", db, 1);
    expect(results, "results", at);
    arguments.threads = plan_.threads;
    if (workspace.is_none()) {
      nb::gil_scoped_release released;
      const Scratch scratch(plan_.workspace_bytes);
      arguments.workspace = scratch.data();
      plan_.run(arguments);
      return;
    }
    const ArrayHead& array = as_array(workspace.ptr(), "workspace");
    if (array.nd != 1 || array.dimensions[0] < workspace_bytes() ||
        (array.dimensions[0] > 1 && array.strides[0] != 1)) {
      const std::string message = "workspace must be a dense 1-D uint8 array of at least " +
                                  std::to_string(workspace_bytes()) + " bytes, got " +
                                  (array.nd == 1 ? std::to_string(array.dimensions[0]) : "another shape");
      throw nb::value_error(message.c_str());
    }
    arguments.workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(array.data) + 63) / 64 * 64);
    nb::gil_scoped_release released;
    plan_.run(arguments);
  }

  const std::string& kernel() const { return plan_.kernel; }
  int threads() const { return plan_.threads; }
  int64_t workspace_bytes() const { return plan_.workspace_bytes > 0 ? plan_.workspace_bytes + 63 : 0; }
  const std::vector<std::string>& notes() const { return plan_.notes; }

 private:
  static void expect(nb::handle tuple, const char* what, Py_ssize_t count) {
    if (PyTuple_Check(tuple.ptr()) && PyTuple_GET_SIZE(tuple.ptr()) == count) return;
    throw nb::value_error((std::string(what) + " must be a tuple of " + std::to_string(count) + " arrays").c_str());
  }

  // One array of a tuple, checked against its canonical extents; missing leading spatial axes have stride 0.
  static Tensor tensor(nb::handle tuple, Py_ssize_t at, const char* name, const int64_t (&extent)[5], int nd) {
    if (!PyTuple_Check(tuple.ptr()) || at >= PyTuple_GET_SIZE(tuple.ptr()))
      expect(tuple, "operands and results", at + 1);
    const ArrayHead& array = as_array(PyTuple_GET_ITEM(tuple.ptr(), at), name);
    bool fits = array.nd == nd;
    Tensor result;
    result.data = array.data;
    for (int axis = 0; fits && axis < nd; ++axis) {
      const int place = axis < 2 ? axis : axis + 5 - nd;
      fits = array.dimensions[axis] == extent[place];
      result.stride[place] = array.strides[axis];
    }
    if (fits) return result;
    std::string message = std::string(name) + " must have the canonical shape (";
    for (int axis = 0; axis < nd; ++axis)
      message += std::to_string(extent[axis < 2 ? axis : axis + 5 - nd]) + (axis + 1 < nd ? ", " : "), got (");
    for (int axis = 0; axis < array.nd; ++axis)
      message += std::to_string(array.dimensions[axis]) + (axis + 1 < array.nd ? ", " : "");
    throw nb::value_error((message + ")").c_str());
  }

  Problem problem_;
  int axes_;
  Plan plan_;
};

using Three = std::array<int64_t, 3>;
using Five = std::array<int64_t, 5>;

BoundPlan make_plan(unsigned wrt, int axes, std::array<int64_t, 4> sizes, std::array<Three, 6> spatial,
                    std::array<int, 3> types, std::array<Five, 3> nominal, int threads, int64_t max_workspace) {
  Problem problem;
  problem.geo.N = sizes[0];
  problem.geo.C = sizes[1];
  problem.geo.K = sizes[2];
  problem.geo.G = sizes[3];
  int64_t(*const fields[])[3] = {&problem.geo.in,     &problem.geo.out,      &problem.geo.kernel,
                                 &problem.geo.stride, &problem.geo.dilation, &problem.geo.pad};
  for (size_t field = 0; field < 6; ++field)
    for (size_t axis = 0; axis < 3; ++axis) (*fields[field])[axis] = spatial[field][axis];
  problem.wrt = wrt;
  problem.dtype = Dtype(types[0]);
  problem.out_dtype = Dtype(types[1]);
  problem.compute = Compute(types[2]);
  for (size_t axis = 0; axis < 5; ++axis) {
    problem.x_nominal[axis] = nominal[0][axis];
    problem.w_nominal[axis] = nominal[1][axis];
    problem.y_nominal[axis] = nominal[2][axis];
  }
  problem.threads = threads > 0 ? std::min(threads, max_threads) : get_threads();
  problem.max_workspace = std::max<int64_t>(0, max_workspace - 63);  // room to align the caller's memory
  problem.isa = &current_isa();
  return BoundPlan(problem, axes);
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

// Threads for a call on torch tensors: as many as torch would use, and no more than we have been told to.
int threads_for_torch() {
  const int torch = torch_threads();
  return torch > 0 ? std::min(torch, get_threads()) : get_threads();
}

}  // namespace
}  // namespace convgrad

NB_MODULE(_native, module) {
  using namespace convgrad;
  array_type = reinterpret_cast<PyTypeObject*>(nb::module_::import_("numpy").attr("ndarray").inc_ref().ptr());
  nb::class_<BoundPlan>(module, "Plan")
      .def("run", &BoundPlan::run, nb::arg("operands"), nb::arg("results"), nb::arg("workspace").none() = nb::none())
      .def_prop_ro("kernel", &BoundPlan::kernel)
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
}
