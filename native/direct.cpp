// What the direct depthwise kernels serve, and their weights; see direct.h.
#include "direct.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "gemm.h"
#include "grouped.h"
#include "threads.h"

namespace convgrad {

bool direct_units(const Problem& problem, DirectUnits& units) {
  const Geometry& geo = problem.geo;
  const bool vectors = problem.dtype == Dtype::f32 || problem.dtype == Dtype::bf16 ||
                       (problem.dtype == Dtype::f16 && problem.isa->level >= 1);
  units = {problem.dtype, problem.isa->vector_bytes / 4, geo.C, 0};
  return vectors && geo.group_in() == 1 && geo.group_out() == 1 && geo.C >= units.unit() &&
         !problem.isa->rounding(problem.dtype, problem.compute);
}

bool direct_fits(const DirectUnits& units, const Tensor& a, const Tensor& b) {
  const int64_t bytes = size_of(units.dtype);
  return a.stride[axis_c] == bytes && b.stride[axis_c] == bytes;
}

int64_t direct_pair(const Problem& problem) {
  // NOTE: level 3 has a bf16 kernel only where vdpbf16ps is the fastest way to multiply bf16 (see isa.cpp).
  const bool fast = problem.isa->level == 3 && problem.isa->gemm->bf16;
  if (!fast || problem.dtype != Dtype::bf16 || problem.geo.kernel[1] < 2) return 0;
  const int64_t stride = problem.geo.stride[1];
  return problem.wrt == wrt_input ? stride / std::gcd(stride, problem.geo.dilation[1]) : 1;
}

void pack_direct(const Geometry& geo, const DirectUnits& units, const Tensor& w, const ElementCode& code, float* packed,
                 int threads) {
  const int64_t taps = geo.taps(), unit = units.unit(), R = geo.kernel[1], S = geo.kernel[2];
  parallel_for(units.units(), threads, [&](int64_t index, int) {
    std::vector<float> line(taps);
    for (int64_t c = 0; c < unit; ++c) {
      read_taps(geo, w, w.data + (units.first(index) + c) * w.stride[axis_o], code, line.data());
      float* to = packed + index * taps * unit + units.place(c);
      for (int64_t tap = 0; tap < taps; ++tap) {
        to[tap * unit] = line[tap];
        if (!units.pair) continue;
        // The taps are bf16: their bits are the upper halves of the floats.
        uint32_t first, second = 0;
        std::memcpy(&first, &line[tap], 4);
        if (tap / S % R + units.pair < R) std::memcpy(&second, &line[tap + units.pair * S], 4);
        first = first >> 16 | (second & 0xffff0000u);
        std::memcpy(to + tap * unit, &first, 4);
      }
    }
  });
}

}  // namespace convgrad
