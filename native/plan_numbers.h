// A problem as a row of numbers: how Python, and a compiled JAX program, say what is to be planned.
#pragma once

#include <algorithm>

#include "conv.h"
#include "threads.h"

namespace convgrad {

// wrt; N, C, K, G; input, output, kernel, stride, dilation, low pad of three axes each; dtype, out_dtype, compute;
// nominal byte strides of x, w, y (five axes each); threads (0: as many as there are); limit of the workspace.
inline constexpr size_t plan_numbers = 1 + 4 + 18 + 3 + 15 + 2;

inline Problem problem_from(const int64_t* at, int threads_if_free) {
  Problem problem;
  problem.wrt = unsigned(*at++);
  Geometry& geo = problem.geo;
  for (int64_t* size : {&geo.N, &geo.C, &geo.K, &geo.G}) *size = *at++;
  for (int64_t(*field)[3] : {&geo.in, &geo.out, &geo.kernel, &geo.stride, &geo.dilation, &geo.pad})
    for (int64_t& value : *field) value = *at++;
  problem.dtype = Dtype(*at++);
  problem.out_dtype = Dtype(*at++);
  problem.compute = Compute(*at++);
  for (int64_t(*strides)[5] : {&problem.x_nominal, &problem.w_nominal, &problem.y_nominal})
    for (int64_t& stride : *strides) stride = *at++;
  const int64_t threads = *at++;
  problem.threads = threads > 0 ? int(std::min<int64_t>(threads, max_threads)) : threads_if_free;
  problem.max_workspace = std::max<int64_t>(0, *at - 63);  // room to align the caller's memory
  problem.isa = &current_isa();
  return problem;
}

}  // namespace convgrad
