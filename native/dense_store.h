// Storing sums: one rounding to the result's type, by strides; tells whether a NaN was among them.
#pragma once

#include <algorithm>
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
      } else {
        nan |= isa_.gemm->any_nan(line, columns);
      }
    }
    if constexpr (!wide)
      if (std::abs(row_stride) < std::abs(column_stride) && rows > 1) {
        // The result's lines run along the rows: turn the tile first.
        alignas(64) float turned[64 * 32];
        for (int64_t r = 0; r < rows; r += 32) {
          const int64_t count = std::min<int64_t>(32, rows - r);
          for (int64_t c = 0; c < columns; c += 64) {
            const int64_t n = std::min<int64_t>(64, columns - c);
            isa_.gemm->transpose32(reinterpret_cast<const uint32_t*>(sums + r * pitch + c), pitch, count, n,
                                   reinterpret_cast<uint32_t*>(turned), 32);
            for (int64_t i = 0; i < n; ++i)
              encode_(turned + i * 32, count, dst + r * row_stride + (c + i) * column_stride, row_stride);
          }
        }
        return !nan;
      }
    for (int64_t r = 0; r < rows; ++r) {
      const Sum* line = sums + r * pitch;
      if constexpr (wide) {
        encode64_(line, columns, dst + r * row_stride, column_stride);
      } else {
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
