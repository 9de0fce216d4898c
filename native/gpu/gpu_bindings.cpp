// Prepared GPU calls as Python builds and runs them.
#include "gpu_bindings.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "prepared_call.h"

namespace nb = nanobind;

namespace convgrad::gpu {
namespace {

constexpr size_t most_slots = 32;

Address as_address(PyObject* number) {
  const Address address = PyLong_AsUnsignedLongLong(number);
  if (address == Address(-1) && PyErr_Occurred()) throw nb::python_error();
  return address;
}

// Fast on purpose: this is the whole host time of a repeated call but for the launches themselves.
void run(PreparedCall& call, nb::handle addresses, Address stream, Address workspace) {
  const bool list = PyList_Check(addresses.ptr());
  if (!list && !PyTuple_Check(addresses.ptr())) throw nb::type_error("addresses must be a list or a tuple of integers");
  const Py_ssize_t count = list ? PyList_GET_SIZE(addresses.ptr()) : PyTuple_GET_SIZE(addresses.ptr());
  if (count != call.slots()) {
    const std::string message = "addresses must be those of " + std::to_string(call.slots()) +
                                " operands and results, got " + std::to_string(count);
    throw nb::value_error(message.c_str());
  }
  if (workspace == 0 && call.workspace_bytes() > 0) {
    const std::string message = "workspace must be the address of " + std::to_string(call.workspace_bytes()) + " bytes";
    throw nb::value_error(message.c_str());
  }
  Address found[most_slots];
  for (Py_ssize_t at = 0; at < count; ++at)
    found[at] = as_address(list ? PyList_GET_ITEM(addresses.ptr(), at) : PyTuple_GET_ITEM(addresses.ptr(), at));
  nb::gil_scoped_release released;
  call.run(found, reinterpret_cast<void*>(stream), workspace);
}

}  // namespace

void bind(nb::module_& module) {
  nb::exception<OutOfResources>(module, "OutOfResources", PyExc_RuntimeError);
  nb::class_<Kernel>(module, "GpuKernel")
      .def("__init__",
           [](Kernel* kernel, std::string name, nb::bytes image, int threads, int shared_bytes, int cluster,
              bool cooperative, bool pdl) {
             new (kernel) Kernel(std::move(name), std::string(image.c_str(), image.size()),
                                 {threads, shared_bytes, cluster, cooperative, pdl});
           },
           nb::arg("name"), nb::arg("image"), nb::kw_only(), nb::arg("threads"), nb::arg("shared_bytes"),
           nb::arg("cluster") = 1, nb::arg("cooperative") = false, nb::arg("pdl") = false)
      .def_ro("name", &Kernel::name);
  nb::class_<PreparedCall>(module, "GpuCall",
                           "A prepared call on a GPU: see `Prepared` in convgrad/plan.py for what it promises.")
      .def("__init__",
           [](PreparedCall* call, std::string problem, int slots, int device, std::string driver) {
             if (slots < 0 || size_t(slots) > most_slots) throw nb::value_error("slots must be 0 to 32");
             new (call) PreparedCall(std::move(problem), slots, device, std::move(driver));
           },
           nb::arg("problem"), nb::arg("slots"), nb::arg("device"), nb::arg("driver") = "libcuda.so.1")
      .def("add_launch", &PreparedCall::add_launch, nb::arg("kernel"), nb::arg("grid"))
      .def("add_pointer", &PreparedCall::add_pointer, nb::arg("slot"), nb::arg("offset"))
      .def("add_scalar",
           [](PreparedCall& call, nb::bytes value) { call.add_scalar(value.c_str(), value.size()); }, nb::arg("value"))
      .def("add_tensor_map",
           [](PreparedCall& call, int slot, int64_t offset, int type, std::vector<uint64_t> extents,
              std::vector<uint64_t> strides, std::vector<uint32_t> box, std::vector<uint32_t> steps, int swizzle,
              int fill) {
             call.add_tensor_map(slot, offset, {type, swizzle, fill, std::move(extents), std::move(strides),
                                                std::move(box), std::move(steps)});
           },
           nb::arg("slot"), nb::arg("offset"), nb::kw_only(), nb::arg("type"), nb::arg("extents"), nb::arg("strides"),
           nb::arg("box"), nb::arg("steps"), nb::arg("swizzle"), nb::arg("fill"))
      .def("add_zeros", &PreparedCall::add_zeros, nb::arg("slot"), nb::arg("offset"), nb::arg("bytes"))
      .def("keep", [](PreparedCall&, nb::handle) {}, nb::keep_alive<1, 2>(), nb::arg("object"),
           "Keep an object, such as a table that a kernel reads, as long as the call.")
      .def("run", &run, nb::arg("addresses"), nb::arg("stream") = 0, nb::arg("workspace") = 0)
      .def_prop_rw("workspace_bytes", &PreparedCall::workspace_bytes, &PreparedCall::set_workspace_bytes)
      .def_prop_ro("steps", &PreparedCall::steps)
      .def_prop_ro("handle", [](PreparedCall& call) { return reinterpret_cast<uintptr_t>(&call); });
  // For code that gets a call's handle as a number: the C function that runs it (prepared_call.h).
  module.attr("run_prepared") = nb::capsule(reinterpret_cast<void*>(&convgrad_run_prepared), "convgrad.run_prepared");
}

}  // namespace convgrad::gpu
