// aten::convolution_backward: from its arguments by one lookup to plans that are ready to run.
//
// Tensors are read through DLPack's C exchange interface (torch 2.10 and later), a table of function pointers on their
// type, in a tenth of a microsecond each. Addresses are read in every call and never kept.
#include "bindings_torch.h"

#include <chrono>
#include <string>
#include <unordered_map>
#include <vector>

#include "bound_plan.h"
#include "gpu/cuda_backward.h"
#include "torch_exchange.h"
#include "torch_team.h"

namespace convgrad {
namespace {

Tensor as_tensor(const DLTensor& from) {
  Tensor tensor;
  tensor.data = from.data + from.byte_offset;
  for (int axis = 0; axis < from.nd; ++axis)
    tensor.stride[axis < 2 ? axis : axis + 5 - from.nd] = from.stride[axis] * (from.type_bits / 8);
  return tensor;
}

// How often and how long something was served.
struct Tally {
  int64_t calls = 0;
  double seconds = 0;
};

// The plans that compute the gradients of one signature, one after the other, and how to make the results.
class PreparedBackward : public ServedBackward {
 public:
  // parts: (plan, x, w, y, db) each, with the places of the plan's tensors or -1; results: the arguments of `allocate`
  // for dx, dw, db, or None.
  PreparedBackward(nb::object parts, nb::object allocate, nb::object results)
      : parts_(std::move(parts)), allocate_(std::move(allocate)), results_(std::move(results)) {
    for (nb::handle part : parts_) {
      Step step{nb::cast<const BoundPlan*>(part[0]), {}};
      for (size_t i = 0; i < 4; ++i) step.at[i] = nb::cast<int>(part[i + 1]);
      steps_.push_back(step);
    }
  }

  nb::object run(const ExchangeApi& api, const DLTensor (&operands)[3], const nb::args&) override {
    Tensor tensors[places];
    for (int i = 0; i < 3; ++i) tensors[i] = as_tensor(operands[i]);
    nb::object made[3];
    for (int i = 0; i < 3; ++i) {
      const nb::handle wanted = results_[i];
      made[i] = wanted.is_none() ? nb::none() : nb::steal(PyObject_CallObject(allocate_.ptr(), wanted.ptr()));
      if (!made[i].is_valid()) throw nb::python_error();
      DLTensor view;
      if (wanted.is_none()) continue;
      if (api.read(made[i].ptr(), &view) != 0) throw nb::python_error();
      tensors[at_dx + i] = as_tensor(view);
    }
    {
      nb::gil_scoped_release released;
      const ExecutorScope scope(torch_team());
      for (const Step& step : steps_) {
        Arguments arguments;
        Tensor* const targets[] = {&arguments.x, &arguments.w, &arguments.y, &arguments.db};
        for (int i = 0; i < 4; ++i)
          if (step.at[i] >= 0) *targets[i] = tensors[step.at[i]];
        step.plan->run_alone(arguments);
      }
    }
    return nb::make_tuple(made[0], made[1], made[2]);
  }

 private:
  struct Step {
    const BoundPlan* plan;
    int at[4];
  };
  nb::object parts_;  // owns the plans
  nb::object allocate_, results_;
  std::vector<Step> steps_;
};

// Tensors' sizes, strides, number formats and devices as bytes: the key of whatever depends on these alone.
class Signature {
 public:
  Signature(nb::object tensor_type, nb::object parameter_type)
      : tensor_type_(std::move(tensor_type)), parameter_type_(std::move(parameter_type)),
        api_(exchange_api(tensor_type_)) {
    if (!api_) throw nb::type_error("this torch has no DLPack exchange interface of major version 1");
  }

  // The key of a dict of tensors; None where one is not plain, or has a type that DLPack has no name for.
  nb::object operator()(nb::dict tensors) const {
    std::string key;
    for (auto [name, tensor] : tensors) {
      DLTensor view;
      if (!read(tensor.ptr(), view)) return nb::none();
      add(key, view);
    }
    return nb::bytes(key.data(), key.size());
  }

  bool read(PyObject* tensor, DLTensor& view) const {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    if (type != tensor_type_.ptr() && type != parameter_type_.ptr()) return false;
    if (api_->read(tensor, &view) == 0) return true;
    PyErr_Clear();
    return false;
  }

  static void add(std::string& key, const DLTensor& view) {
    add(key, int64_t(view.device_type) << 32 | view.type_code << 16 | view.type_bits << 8 | view.nd);
    add(key, view.device_id);
    for (int axis = 0; axis < view.nd; ++axis) {
      add(key, view.shape[axis]);
      add(key, view.stride[axis]);
    }
  }

  static void add(std::string& key, int64_t number) {
    key.append(reinterpret_cast<const char*>(&number), sizeof number);
  }

  const ExchangeApi& api() const { return *api_; }

 private:
  nb::object tensor_type_, parameter_type_;
  const ExchangeApi* api_;
};

// The registered kernel. What it does with a call depends on the signature alone, and is asked for once: `prepare`
// answers a call's arguments with (ServedBackward or a function of the same arguments, Tally).
class TorchBackward {
 public:
  TorchBackward(nb::object prepare, nb::object tensor_type, nb::object parameter_type)
      : prepare_(std::move(prepare)), signature_(std::move(tensor_type), std::move(parameter_type)) {}

  // keys, grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
  nb::object operator()(nb::args arguments) {
    const auto begin = std::chrono::steady_clock::now();
    DLTensor operands[3];
    Entry* entry = nullptr;
    if (read_key(arguments, operands)) {
      const auto found = entries_.find(key_);
      entry = found != entries_.end() ? &found->second : remember(arguments);
    }
    if (!entry) {  // tensors of another type: decided anew every time
      Entry once = asked(arguments);
      return once.handler(*arguments);
    }
    const Entry served = *entry;  // the table may change during the call
    nb::object result = served.prepared ? served.prepared->run(signature_.api(), operands, arguments) : served.handler(*arguments);
    ++served.tally->calls;
    served.tally->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
  }

  void clear() { entries_.clear(); }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    nb::object handler, owner;  // the owner of the tally
    ServedBackward* prepared;
    Tally* tally;
  };
  static constexpr size_t most_entries = 8192;

  Entry asked(nb::args arguments) {
    const nb::object answer = prepare_(*arguments);
    Entry entry{answer[0], answer[1], nullptr, nb::cast<Tally*>(answer[1])};
    nb::try_cast(entry.handler, entry.prepared);
    return entry;
  }

  Entry* remember(nb::args arguments) {
    const std::string key = key_;  // `prepare` may run torch, which may come back here
    Entry entry = asked(arguments);
    if (entries_.size() >= most_entries) entries_.clear();
    return &entries_.insert_or_assign(key, std::move(entry)).first->second;
  }

  // Everything that decides what is done, as bytes; false where the tensors are not plain ones.
  bool read_key(const nb::args& arguments, DLTensor (&operands)[3]) {
    key_.clear();
    add(threads_for_torch());
    for (int i = 0; i < 3; ++i) {
      if (!signature_.read(arguments[size_t(i) + 1].ptr(), operands[i])) return false;
      Signature::add(key_, operands[i]);
    }
    for (size_t i = 5; i < 12; ++i)
      if (!add(arguments[i].ptr())) return false;
    return true;
  }

  void add(int64_t number) { Signature::add(key_, number); }

  // An integer, a bool, or a list of them.
  bool add(PyObject* value) {
    if (PyList_Check(value)) {
      const Py_ssize_t size = PyList_GET_SIZE(value);
      add(int64_t(size));
      for (Py_ssize_t i = 0; i < size; ++i)
        if (!add(PyList_GET_ITEM(value, i))) return false;
      return true;
    }
    if (!PyLong_Check(value)) return false;
    add(int64_t(PyLong_AsLongLong(value)));
    return true;
  }

  nb::object prepare_;
  Signature signature_;
  std::unordered_map<std::string, Entry> entries_;
  std::string key_;
};

}  // namespace

void bind_torch(nb::module_& module) {
  nb::set_leak_warnings(false);  // the kernel and its tallies live as long as the process
  nb::class_<Tally>(module, "Tally").def(nb::init<>()).def_rw("calls", &Tally::calls).def_rw("seconds", &Tally::seconds);
  nb::class_<ServedBackward>(module, "ServedBackward");
  nb::class_<PreparedBackward, ServedBackward>(module, "PreparedBackward")
      .def(nb::init<nb::object, nb::object, nb::object>());
  nb::class_<gpu::CudaBackward, ServedBackward>(module, "CudaBackward")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), nb::arg("calls"),
           nb::arg("results"), nb::arg("torch"), nb::arg("otherwise"), nb::arg("allowed").none() = nb::none());
  nb::class_<gpu::CudaRepeat>(module, "CudaRepeat")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), nb::arg("calls"), nb::arg("results"),
           nb::arg("torch"), nb::arg("tensor_type"))
      .def("__call__", &gpu::CudaRepeat::operator());
  nb::class_<Signature>(module, "TensorSignature")
      .def(nb::init<nb::object, nb::object>(), nb::arg("tensor_type"), nb::arg("parameter_type"))
      .def("__call__", &Signature::operator());
  nb::class_<TorchBackward>(module, "TorchBackward")
      .def(nb::init<nb::object, nb::object, nb::object>())
      .def("__call__", &TorchBackward::operator())
      .def("__len__", &TorchBackward::size)
      .def("clear", &TorchBackward::clear);
}

}  // namespace convgrad
