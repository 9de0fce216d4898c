// What the direct depthwise kernels serve, and their weights; see direct.h.
#include "direct.h"

#include <algorithm>

#include "grouped.h"
#include "threads.h"

namespace convgrad {

bool direct_units(const Problem& problem, DirectUnits& units) {
  const Geometry& geo = problem.geo;
  const bool vectors = problem.dtype == Dtype::f32 || problem.dtype == Dtype::bf16 ||
                       (problem.dtype == Dtype::f16 && problem.isa->level >= 1);
  units = {problem.dtype, problem.isa->vector_bytes / 4, geo.C};
  return vectors && geo.group_in() == 1 && geo.group_out() == 1 && geo.C >= units.unit() &&
         !problem.isa->rounding(problem.dtype, problem.compute);
}

bool direct_fits(const DirectUnits& units, const Tensor& a, const Tensor& b) {
  const int64_t bytes = size_of(units.dtype);
  return a.stride[axis_c] == bytes && b.stride[axis_c] == bytes;
}

void pack_direct(const Geometry& geo, const DirectUnits& units, const Tensor& w, const ElementCode& code, float* packed,
                 int threads) {
  const int64_t taps = geo.taps(), unit = units.unit();
  parallel_for(units.units(), threads, [&](int64_t index, int) {
    std::vector<float> line(taps);
    for (int64_t c = 0; c < unit; ++c) {
      read_taps(geo, w, w.data + (units.first(index) + c) * w.stride[axis_o], code, line.data());
      float* to = packed + index * taps * unit + units.place(c);
      for (int64_t tap = 0; tap < taps; ++tap) to[tap * unit] = line[tap];
    }
  });
}

}  // namespace convgrad
