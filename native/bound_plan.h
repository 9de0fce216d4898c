// A plan as Python sees it, and arrays as it takes them.
#pragma once

#include <nanobind/nanobind.h>

#include <unistd.h>

#include <string>

#include "conv.h"
#include "scratch.h"
#include "threads.h"

namespace convgrad {

namespace nb = nanobind;

// The head of NumPy's array object. Its first fields have not changed since NumPy 1.0 and are what the public macros
// PyArray_DATA, _NDIM, _DIMS, _STRIDES, _DESCR and _FLAGS read; reading them here keeps a call at two microseconds and
// covers the dtypes (bfloat16, float8) that the buffer protocol and DLPack refuse.
struct ArrayHead {
  PyObject_HEAD
  char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* dtype;
  int flags;
  bool writable() const { return flags & 0x400; }  // NPY_ARRAY_WRITEABLE
};

inline PyTypeObject* array_type = nullptr;
inline nb::handle byte_type;  // numpy.dtype("uint8")

inline const ArrayHead& as_array(PyObject* object, const char* name) {
  if (!PyObject_TypeCheck(object, array_type)) {
    const std::string message = std::string(name) + " must be a numpy.ndarray, got " + Py_TYPE(object)->tp_name;
    throw nb::type_error(message.c_str());
  }
  return *reinterpret_cast<const ArrayHead*>(object);
}

inline unsigned long main_thread = 0;  // Python's, which alone receives signals

// Whether a signal handler raised an exception, such as KeyboardInterrupt; for a thread without the GIL.
inline bool python_interrupts() {
  if (PyThread_get_thread_ident() != main_thread) return false;
  const nb::gil_scoped_acquire acquired;
  return PyErr_CheckSignals() != 0;
}

// Without the GIL while it lives. NOTE: a thread that asks for the GIL of an interpreter that ends would be ended by
// force, and the process with it; it waits for the end of the process instead.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    while (ending()) pause();
    PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  static bool ending() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
  }
  PyThreadState* state_;
};

// What an array of a run must be: its name in messages, extents, number of axes, dtype, and whether it is written.
struct Expected {
  const char* name;
  const int64_t (&extent)[5];
  int axes;
  nb::handle dtype;
  bool written;
};

inline void check_dtype(const ArrayHead& array, const char* name, nb::handle dtype) {
  // The dtypes of NumPy and of its extensions are single objects; only others are worth a comparison.
  if (array.dtype == dtype.ptr() || nb::handle(array.dtype).equal(dtype)) return;
  const std::string message = std::string(name) + " must have dtype " + nb::str(dtype).c_str() + ", got " +
                              nb::str(nb::handle(array.dtype)).c_str();
  throw nb::type_error(message.c_str());
}

class BoundPlan {
 public:
  BoundPlan(const Problem& problem, int axes, nb::object dtype, nb::object out_dtype)
      : problem_(problem), axes_(axes), dtype_(std::move(dtype)), out_dtype_(std::move(out_dtype)),
        plan_(choose_plan(problem)) {}

  // operands: grad_output, input, weight (those that are needed); results: in the order of wrt.
  void run(nb::handle operands, nb::handle results, nb::handle workspace) const {
    const unsigned wrt = problem_.wrt;
    Arguments arguments;
    Py_ssize_t at = 0;
    const Geometry& g = problem_.geo;
    const int64_t x[5] = {g.N, g.C, g.in[0], g.in[1], g.in[2]}, y[5] = {g.N, g.K, g.out[0], g.out[1], g.out[2]};
    const int64_t w[5] = {g.K, g.group_in(), g.kernel[0], g.kernel[1], g.kernel[2]}, db[5] = {g.K, 1, 1, 1, 1};
    const auto operand = [&](const char* name, const int64_t (&extent)[5]) {
      return tensor(operands, at++, {name, extent, axes_ + 2, dtype_, false});
    };
    if (wrt & (wrt_input | wrt_weight | wrt_bias)) arguments.y = operand("grad_output", y);
    if (wrt & (wrt_output | wrt_weight)) arguments.x = operand("input", x);
    if (wrt & (wrt_output | wrt_input)) arguments.w = operand("weight", w);
    expect(operands, "operands", at);
    at = 0;
    const auto result = [&](const char* name, const int64_t (&extent)[5], int axes) {
      return tensor(results, at++, {name, extent, axes, out_dtype_, true});
    };
    if (wrt & wrt_output) arguments.y = result("the output", y, axes_ + 2);
    if (wrt & wrt_input) arguments.x = result("the input gradient", x, axes_ + 2);
    if (wrt & wrt_weight) arguments.w = result("the weight gradient", w, axes_ + 2);
    if (wrt & wrt_bias) arguments.db = result("the bias gradient", db, 1);
    expect(results, "results", at);
    arguments.threads = plan_.threads;
    if (workspace.is_none()) return interruptibly([&] { run_alone(arguments); });
    const ArrayHead& array = as_array(workspace.ptr(), "workspace");
    if (array.nd != 1 || array.dimensions[0] < workspace_bytes() ||
        (array.dimensions[0] > 1 && array.strides[0] != 1)) {
      const std::string message = "workspace must be a dense 1-D uint8 array of at least " +
                                  std::to_string(workspace_bytes()) + " bytes, got " +
                                  (array.nd == 1 ? std::to_string(array.dimensions[0]) : "another shape");
      throw nb::value_error(message.c_str());
    }
    check_dtype(array, "workspace", byte_type);
    if (!array.writable()) throw nb::value_error("workspace is read-only");
    arguments.workspace = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(array.data) + 63) / 64 * 64);
    interruptibly([&] { plan_.run(arguments); });
  }

  // Tensors that are known to fit; threads and a workspace are ours. Needs no Python.
  void run_alone(Arguments& arguments) const {
    const Scratch scratch(plan_.workspace_bytes);
    arguments.threads = plan_.threads;
    arguments.workspace = scratch.data();
    plan_.run(arguments);
  }

  const std::string& kernel() const { return plan_.kernel; }
  double seconds() const { return plan_.seconds; }
  int threads() const { return plan_.threads; }
  int64_t workspace_bytes() const { return plan_.workspace_bytes > 0 ? plan_.workspace_bytes + 63 : 0; }
  const std::vector<std::string>& notes() const { return plan_.notes; }

 private:
  // Runs the body without the GIL; raises what a signal handler raised meanwhile. The results are undefined then.
  template <typename Body>
  static void interruptibly(const Body& body) {
    Interruptible watch(python_interrupts);
    {
      const WithoutGil released;
      body();
    }
    if (watch.given_up()) throw nb::python_error();
  }

  static void expect(nb::handle tuple, const char* what, Py_ssize_t count) {
    if (PyTuple_Check(tuple.ptr()) && PyTuple_GET_SIZE(tuple.ptr()) == count) return;
    throw nb::value_error((std::string(what) + " must be a tuple of " + std::to_string(count) + " arrays").c_str());
  }

  // One array of a tuple, checked against its canonical extents; missing leading spatial axes have stride 0.
  static Tensor tensor(nb::handle tuple, Py_ssize_t at, const Expected& expected) {
    if (!PyTuple_Check(tuple.ptr()) || at >= PyTuple_GET_SIZE(tuple.ptr()))
      expect(tuple, "operands and results", at + 1);
    const auto& [name, extent, nd, dtype, written] = expected;
    const ArrayHead& array = as_array(PyTuple_GET_ITEM(tuple.ptr(), at), name);
    check_dtype(array, name, dtype);
    if (written && !array.writable()) throw nb::value_error((std::string(name) + " is read-only").c_str());
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
  nb::object dtype_, out_dtype_;  // of the arrays of a run
  Plan plan_;
};

}  // namespace convgrad
