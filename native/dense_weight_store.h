// Storing the sums of a weight gradient.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "dense_prefetch.h"
#include "dense_store.h"
#include "dense_weight.h"

namespace convgrad {

inline constexpr int64_t stored_width = 16;  // result channels that are stored at once

template <typename Sum>
inline void copy_sums(const Sum* from, int64_t n, Sum* to) {
  if (n == stored_width) {
    std::memcpy(to, from, size_t(stored_width) * sizeof(Sum));  // of a fixed size: no call
  } else {
    std::copy(from, from + n, to);
  }
}

// Whether rows of 32 bf16 from output channel `first` on are cache lines of a result too large to stay in the cache.
inline bool streams_weight(const Geometry& geo, const Tensor& w, int64_t first) {
  uintptr_t places = reinterpret_cast<uintptr_t>(w.data + first * w.stride[axis_o]) | uintptr_t(w.stride[axis_i]);
  for (int axis : {axis_d, axis_h, axis_w})
    if (geo.kernel[axis - axis_d] > 1) places |= uintptr_t(w.stride[axis]);
  return places % 64 == 0 && writes_around_caches(geo.K * geo.group_in() * geo.taps() * size_of(Dtype::bf16));
}

// Sums [tap][c][k] to the result by its strides. Lines of the result run along its densest axis: k (HWIO), or for each
// k the channels of a tap (OHWI), or channels and taps together (OIHW), which takes a transposition.
template <typename T>
void store_weight(const WeightGradient& plan, const typename Packed<T>::Sum* sums, int64_t in_count, int64_t out_count,
                  char* base, const Tensor& w) {
  using Sum = typename Packed<T>::Sum;
  const Geometry& geo = plan.problem.geo;
  const Store<T> encode(*plan.problem.isa, plan.problem.out_dtype);
  const int64_t columns = round_up(plan.out_block, plan.gemm->cols), taps = geo.taps();
  auto tap_at = [&](int64_t tap) {
    const int64_t tw = tap % geo.kernel[2], th = tap / geo.kernel[2] % geo.kernel[1];
    return tap / geo.kernel[2] / geo.kernel[1] * w.stride[axis_d] + th * w.stride[axis_h] + tw * w.stride[axis_w];
  };
  const int64_t step_i = std::abs(w.stride[axis_i]), step_o = std::abs(w.stride[axis_o]);
  if (step_o <= step_i && step_o <= std::abs(taps > 1 ? w.stride[axis_w] : step_i)) {
    for (int64_t tap = 0; tap < taps; ++tap)
      encode(sums + tap * plan.in_block * columns, columns, in_count, out_count, base + tap_at(tap), w.stride[axis_i],
             w.stride[axis_o]);
    return;
  }
  bool even = true;  // the taps of one channel, and the channels, follow each other at one distance
  const int64_t step = taps > 1 ? tap_at(1) : w.stride[axis_i];
  for (int64_t tap = 0; tap < taps; ++tap) even &= tap_at(tap) == tap * step;
  even &= w.stride[axis_i] == taps * step;
  const int64_t line_taps = even ? taps : 1;  // taps in one line of the result
  const int64_t lines_in = std::max<int64_t>(1, 256 / line_taps);
  constexpr int64_t width = stored_width;
  std::vector<Sum> block(size_t(lines_in * line_taps * width)), turned(block.size());
  for (int64_t first_tap = 0; first_tap < taps; first_tap += line_taps)
    for (int64_t c0 = 0; c0 < in_count; c0 += lines_in) {
      const int64_t count = std::min(lines_in, in_count - c0), length = count * line_taps;
      for (int64_t k = 0; k < out_count; k += width) {
        const int64_t n = std::min(width, out_count - k);
        const Sum* from = sums + (first_tap * plan.in_block + c0) * columns + k;
        int64_t pitch = columns;
        if (line_taps > 1) {
          for (int64_t c = 0; c < count; ++c)
            for (int64_t tap = 0; tap < line_taps; ++tap)
              copy_sums(from + (tap * plan.in_block + c) * columns, n, &block[size_t((c * line_taps + tap) * width)]);
          from = block.data();
          pitch = width;
        }
        if constexpr (std::is_same_v<Sum, float>) {
          plan.problem.isa->gemm->transpose32(reinterpret_cast<const uint32_t*>(from), pitch, length, n,
                                              reinterpret_cast<uint32_t*>(turned.data()), length);
        } else {
          for (int64_t i = 0; i < length; ++i)
            for (int64_t j = 0; j < n; ++j) turned[size_t(j * length + i)] = from[i * pitch + j];
        }
        encode(turned.data(), length, n, length,
               base + k * w.stride[axis_o] + c0 * w.stride[axis_i] + tap_at(first_tap), w.stride[axis_o],
               even ? step : w.stride[axis_i]);
      }
    }
}

}  // namespace convgrad
