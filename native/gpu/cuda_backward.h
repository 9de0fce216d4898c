// Torch's CUDA tensors to prepared calls: results and workspace of its allocator, launches on its current stream.
#pragma once

#include <algorithm>
#include <vector>

#include "../torch_exchange.h"
#include "prepared_call.h"

namespace convgrad::gpu {

// Prepared calls on the same tensors, one after the other, whose results are made for each run.
class CudaRun {
 public:
  // calls: (GpuCall, the places of its slots among operands and results) each; results: the arguments of `empty` for
  // each, or None; torch: the functions empty, allocate, free, current_device and current_stream.
  CudaRun(nb::object calls, nb::object results, nb::object torch)
      : owned_(std::move(calls)), results_(std::move(results)), empty_(torch.attr("empty")),
        allocate_(torch.attr("allocate")), free_(torch.attr("free")), current_device_(torch.attr("current_device")),
        current_stream_(torch.attr("current_stream")) {
    for (nb::handle one : owned_) {
      Call call{nb::cast<PreparedCall*>(one[0]), {}};
      for (nb::handle place : one[1]) call.at.push_back(nb::cast<size_t>(place));
      workspace_bytes_ = std::max(workspace_bytes_, call.prepared->workspace_bytes());
      calls_.push_back(std::move(call));
    }
  }

  // The results for operands at `tensors`; an invalid object where they are not aligned or not on the current device.
  nb::object run(const ExchangeApi& api, std::vector<Address>& tensors, int device) const {
    Address together = 0;
    for (Address address : tensors) together |= address;
    if (together % alignment != 0 || nb::cast<int>(current_device_()) != device) return nb::object();
    const size_t count = nb::len(results_);
    nb::object made = nb::steal(PyTuple_New(Py_ssize_t(count)));
    for (size_t i = 0; i < count; ++i) {
      const nb::handle wanted = results_[i];
      nb::object result = wanted.is_none() ? nb::none() : nb::steal(PyObject_CallObject(empty_.ptr(), wanted.ptr()));
      if (!result.is_valid()) throw nb::python_error();
      tensors.push_back(0);
      if (!wanted.is_none()) {
        DLTensor view;
        if (api.read(result.ptr(), &view) != 0) throw nb::python_error();
        tensors.back() = address_of(view);
      }
      PyTuple_SET_ITEM(made.ptr(), Py_ssize_t(i), result.release().ptr());
    }
    const nb::object stream = current_stream_(device);
    const Workspace workspace(*this, stream);
    start(tensors, reinterpret_cast<void*>(nb::cast<Address>(stream)), workspace.address);
    return made;
  }

  static Address address_of(const DLTensor& view) { return reinterpret_cast<Address>(view.data) + view.byte_offset; }

 private:
  static constexpr Address alignment = 16;  // bytes; calls are prepared for it

  struct Call {
    PreparedCall* prepared;
    std::vector<size_t> at;
  };

  // Memory of torch's allocator; what the stream does after these launches may have it.
  struct Workspace {
    Workspace(const CudaRun& owner, const nb::object& stream) : owner(owner) {
      if (owner.workspace_bytes_ == 0) return;
      memory = owner.allocate_(owner.workspace_bytes_, stream);
      address = nb::cast<Address>(memory);
    }
    ~Workspace() {
      if (!memory.is_valid()) return;
      const nb::object done = nb::steal(PyObject_CallOneArg(owner.free_.ptr(), memory.ptr()));
      if (!done.is_valid()) PyErr_WriteUnraisable(owner.free_.ptr());
    }
    const CudaRun& owner;
    nb::object memory;
    Address address = 0;
  };

  void start(const std::vector<Address>& tensors, void* stream, Address workspace) const {
    nb::gil_scoped_release released;
    std::vector<Address> addresses;
    for (const Call& call : calls_) {
      addresses.clear();
      for (size_t place : call.at) addresses.push_back(tensors[place]);
      call.prepared->run(addresses.data(), stream, workspace);
    }
  }

  nb::object owned_;  // owns the prepared calls
  nb::object results_, empty_, allocate_, free_, current_device_, current_stream_;
  std::vector<Call> calls_;
  int64_t workspace_bytes_ = 0;
};

// aten::convolution_backward; `otherwise` serves what `CudaRun` does not, and calls while `allowed`, a function or None,
// does not say True.
class CudaBackward : public ServedBackward {
 public:
  CudaBackward(nb::object calls, nb::object results, nb::object torch, nb::object otherwise, nb::object allowed)
      : run_(std::move(calls), std::move(results), std::move(torch)), otherwise_(std::move(otherwise)),
        allowed_(std::move(allowed)) {}

  nb::object run(const ExchangeApi& api, const DLTensor (&operands)[3], const nb::args& arguments) override {
    if (!allowed_.is_none() && !allowed_().is(nb::bool_(true))) return otherwise_(*arguments);
    std::vector<Address> tensors;
    tensors.reserve(places);
    for (const DLTensor& operand : operands) tensors.push_back(CudaRun::address_of(operand));
    nb::object made = run_.run(api, tensors, operands[0].device_id);
    return made.is_valid() ? made : otherwise_(*arguments);
  }

 private:
  CudaRun run_;
  nb::object otherwise_, allowed_;
};

// A call of a public function that is like an earlier one but for its addresses.
class CudaRepeat {
 public:
  CudaRepeat(nb::object calls, nb::object results, nb::object torch, nb::object tensor_type)
      : run_(std::move(calls), std::move(results), std::move(torch)), api_(exchange_api(tensor_type)),
        is_neg_(nb::str("is_neg")) {
    if (!api_) throw nb::type_error("this torch has no DLPack exchange interface of major version 1");
  }

  // operands -> results, or None where the long way has to be taken.
  nb::object operator()(nb::iterable operands) const {
    std::vector<Address> tensors;
    tensors.reserve(places);
    int device = 0;
    for (nb::handle operand : operands) {
      DLTensor view;
      const nb::object negative = nb::steal(PyObject_CallMethodNoArgs(operand.ptr(), is_neg_.ptr()));
      if (!negative.is_valid() || api_->read(operand.ptr(), &view) != 0) throw nb::python_error();
      if (negative.is(nb::bool_(true))) return nb::none();
      tensors.push_back(CudaRun::address_of(view));
      device = view.device_id;
    }
    nb::object made = run_.run(*api_, tensors, device);
    return made.is_valid() ? made : nb::none();
  }

 private:
  CudaRun run_;
  const ExchangeApi* api_;
  nb::object is_neg_;
};

}  // namespace convgrad::gpu
