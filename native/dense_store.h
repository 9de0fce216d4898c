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
  Store(const Isa& isa, Dtype dtype) : isa_(isa), encode_(isa.encode_block[int(dtype)]), encode64_(isa.encode64[int(dtype)]) {}

  // Element (r, c) of sums[r*pitch + c] goes to dst + r*row_stride + c*column_stride (bytes).
  bool operator()(const Sum* sums, int64_t pitch, int64_t rows, int64_t columns, char* dst, int64_t row_stride,
                  int64_t column_stride) const {
    if constexpr (wide) {
      bool nan = false;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) nan |= sums[r * pitch + c] != sums[r * pitch + c];
        encode64_(sums + r * pitch, columns, dst + r * row_stride, column_stride);
      }
      return !nan;
    } else {
      if (std::abs(row_stride) >= std::abs(column_stride) || rows == 1)
        return !encode_(sums, pitch, rows, columns, dst, row_stride, column_stride);
      // The result's lines run along the rows: turn the tile first.
      bool nan = false;
      alignas(64) float turned[32 * 32];
      for (int64_t r = 0; r < rows; r += 32)
        for (int64_t c = 0; c < columns; c += 32) {
          const int64_t count = std::min<int64_t>(32, rows - r), n = std::min<int64_t>(32, columns - c);
          isa_.gemm->transpose32(reinterpret_cast<const uint32_t*>(sums + r * pitch + c), pitch, count, n,
                                 reinterpret_cast<uint32_t*>(turned), 32);
          nan |= encode_(turned, 32, n, count, dst + r * row_stride + c * column_stride, column_stride, row_stride);
        }
      return !nan;
    }
  }

 private:
  const Isa& isa_;
  EncodeBlock encode_;
  EncodeLine64 encode64_;
};

}  // namespace convgrad
