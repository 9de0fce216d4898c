// Tensors of torch read through DLPack's C exchange interface, a table of function pointers on their type.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace convgrad {

namespace nb = nanobind;

// As DLPack 1.3 lays them out.
struct DLTensor {
  char* data;
  int32_t device_type, device_id;
  int32_t nd;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* stride;  // in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  void* older;
  void* unused[3];
  int (*read)(void* object, DLTensor* tensor);  // borrows shape and strides from the object
};

inline const ExchangeApi* exchange_api(nb::handle tensor_type) {
  if (!nb::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return nullptr;
  const nb::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw nb::python_error();
  return api->major == 1 ? api : nullptr;
}

// What serves the calls of one signature: operands grad_output, input, weight, already read, and all arguments.
class ServedBackward {
 public:
  virtual ~ServedBackward() = default;
  virtual nb::object run(const ExchangeApi& api, const DLTensor (&operands)[3], const nb::args& arguments) = 0;
};

// Places of tensors in a prepared call.
enum Place { at_dy, at_x, at_w, at_dx, at_dw, at_db, places };

}  // namespace convgrad
