// aten::convolution_backward on CUDA tensors: prepared calls, and how to make their results.
#pragma once

#include <algorithm>
#include <vector>

#include "../torch_exchange.h"
#include "prepared_call.h"

namespace convgrad::gpu {

class CudaBackward : public ServedBackward {
 public:
  // calls: (GpuCall, the places of its slots) each; results: the arguments of `empty` for dx, dw, db, or None;
  // torch: the functions empty, allocate, free, current_device and current_stream; otherwise: serves calls whose
  // tensors are not aligned, or on another device than the current one.
  CudaBackward(nb::object calls, nb::object results, nb::object torch, nb::object otherwise)
      : owned_(std::move(calls)), results_(std::move(results)), empty_(torch.attr("empty")),
        allocate_(torch.attr("allocate")), free_(torch.attr("free")), current_device_(torch.attr("current_device")),
        current_stream_(torch.attr("current_stream")), otherwise_(std::move(otherwise)) {
    for (nb::handle one : owned_) {
      Call call{nb::cast<PreparedCall*>(one[0]), {}};
      for (nb::handle place : one[1]) call.at.push_back(nb::cast<size_t>(place));
      workspace_bytes_ = std::max(workspace_bytes_, call.prepared->workspace_bytes());
      calls_.push_back(std::move(call));
    }
  }

  nb::object run(const ExchangeApi& api, const DLTensor (&operands)[3], const nb::args& arguments) override {
    Address tensors[places] = {};
    Address together = 0;
    for (size_t i = 0; i < 3; ++i) {
      tensors[i] = reinterpret_cast<Address>(operands[i].data) + operands[i].byte_offset;
      together |= tensors[i];
    }
    const int device = operands[0].device_id;
    if (together % alignment != 0 || nb::cast<int>(current_device_()) != device) return otherwise_(*arguments);
    nb::object made[3];
    for (size_t i = 0; i < 3; ++i) {
      const nb::handle wanted = results_[i];
      made[i] = wanted.is_none() ? nb::none() : nb::steal(PyObject_CallObject(empty_.ptr(), wanted.ptr()));
      if (!made[i].is_valid()) throw nb::python_error();
      DLTensor view;
      if (wanted.is_none()) continue;
      if (api.read(made[i].ptr(), &view) != 0) throw nb::python_error();
      tensors[at_dx + i] = reinterpret_cast<Address>(view.data) + view.byte_offset;
    }
    const nb::object stream = current_stream_(device);
    const Workspace workspace(*this, stream);
    start(tensors, reinterpret_cast<void*>(nb::cast<Address>(stream)), workspace.address);
    return nb::make_tuple(made[0], made[1], made[2]);
  }

 private:
  static constexpr Address alignment = 16;  // bytes; calls are prepared for it

  struct Call {
    PreparedCall* prepared;
    std::vector<size_t> at;
  };

  // Memory of torch's allocator; what the stream does after these launches may have it.
  struct Workspace {
    Workspace(const CudaBackward& owner, const nb::object& stream) : owner(owner) {
      if (owner.workspace_bytes_ == 0) return;
      memory = owner.allocate_(owner.workspace_bytes_, stream);
      address = nb::cast<Address>(memory);
    }
    ~Workspace() {
      if (!memory.is_valid()) return;
      const nb::object done = nb::steal(PyObject_CallOneArg(owner.free_.ptr(), memory.ptr()));
      if (!done.is_valid()) PyErr_WriteUnraisable(owner.free_.ptr());
    }
    const CudaBackward& owner;
    nb::object memory;
    Address address = 0;
  };

  void start(const Address (&tensors)[places], void* stream, Address workspace) const {
    nb::gil_scoped_release released;
    std::vector<Address> addresses;
    for (const Call& call : calls_) {
      addresses.clear();
      for (size_t place : call.at) addresses.push_back(tensors[place]);
      call.prepared->run(addresses.data(), stream, workspace);
    }
  }

  nb::object owned_;  // owns the prepared calls
  nb::object results_, empty_, allocate_, free_, current_device_, current_stream_, otherwise_;
  std::vector<Call> calls_;
  int64_t workspace_bytes_ = 0;
};

}  // namespace convgrad::gpu
