// Storing sums: one rounding to the result's type, by strides; tells whether a NaN was among them.
#pragma once

#include <cstdlib>
#include <type_traits>

#include "conv.h"
#include "gemm.h"

namespace convgrad {

template <typename T>
class Store {
  static constexpr bool wide = std::is_same_v<T, double>;
  using Sum = std::conditional_t<wide, double, float>;

 public:
  Store(const Isa& isa, Dtype dtype) : isa_(isa), encode_(isa.encode[int(dtype)]), encode64_(isa.encode64[int(dtype)]) {}

  // Element (r, c) of sums[r*pitch + c] goes to dst + r*row_stride + c*column_stride (bytes).
  bool operator()(const Sum* sums, int64_t pitch, int64_t rows, int64_t columns, char* dst, int64_t row_stride,
                  int64_t column_stride) const {
    bool nan = false;
    for (int64_t r = 0; r < rows; ++r) {
      const Sum* line = sums + r * pitch;
      if constexpr (wide) {
        for (int64_t c = 0; c < columns; ++c) nan |= line[c] != line[c];
        encode64_(line, columns, dst + r * row_stride, column_stride);
      } else {
        nan |= isa_.gemm->any_nan(line, columns);
        encode_(line, columns, dst + r * row_stride, column_stride);
      }
    }
    return !nan;
  }

 private:
  const Isa& isa_;
  EncodeLine encode_;
  EncodeLine64 encode64_;
};

}  // namespace convgrad
