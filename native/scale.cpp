#include "scale.h"

#include <algorithm>
#include <cstdlib>

#include "threads.h"

namespace convgrad {
namespace {

constexpr int64_t line_length = 512;    // elements that are converted at once
constexpr int64_t task_length = 1 << 16;  // elements of a task, about

// Axes from the widest stride of the result to the narrowest; neighbours that are one run in both arrays are merged.
struct Runs {
  int axes = 0;
  int64_t extent[5], from[5], to[5];

  Runs(const Tensor& sums, const Tensor& result, const int64_t (&extents)[5]) {
    int order[5] = {0, 1, 2, 3, 4};
    std::stable_sort(order, order + 5, [&](int a, int b) {
      return std::llabs(result.stride[a]) > std::llabs(result.stride[b]);
    });
    for (int axis : order) {
      if (extents[axis] == 1) continue;
      const int64_t n = extents[axis], f = sums.stride[axis], t = result.stride[axis];
      if (axes > 0 && from[axes - 1] == n * f && to[axes - 1] == n * t) {
        extent[axes - 1] *= n;
        from[axes - 1] = f;
        to[axes - 1] = t;
      } else {
        extent[axes] = n;
        from[axes] = f;
        to[axes++] = t;
      }
    }
    if (axes == 0) extent[axes] = 1, from[axes] = 0, to[axes++] = 0;
  }
};

}  // namespace

void scale(const Tensor& sums, Dtype sums_dtype, const Tensor& result, Dtype dtype, const int64_t (&extent)[5],
           double factor, const Isa& isa, int threads) {
  const Runs runs(sums, result, extent);
  const int last = runs.axes - 1;
  int64_t lines = 1;
  for (int axis = 0; axis < last; ++axis) lines *= runs.extent[axis];
  const int64_t n = runs.extent[last];
  if (lines == 0 || n == 0) return;
  const int64_t cuts = (n + task_length - 1) / task_length;  // of a long line
  const int64_t together = cuts > 1 ? 1 : std::max<int64_t>(1, task_length / n);
  const EncodeLine64 encode = isa.encode64[int(dtype)];
  parallel_for((lines + together - 1) / together * cuts, threads, [&](int64_t task, int) {
    const int64_t begin = n * (task % cuts) / cuts, end = n * (task % cuts + 1) / cuts;
    const int64_t first = task / cuts * together;
    alignas(64) float narrow[line_length];
    alignas(64) double line[line_length];
    for (int64_t at = first; at < std::min(lines, first + together); ++at) {
      const char* from = sums.data;
      char* to = result.data;
      for (int64_t rest = at, axis = last - 1; axis >= 0; --axis) {
        from += rest % runs.extent[axis] * runs.from[axis];
        to += rest % runs.extent[axis] * runs.to[axis];
        rest /= runs.extent[axis];
      }
      for (int64_t i = begin; i < end; i += line_length) {
        const int64_t count = std::min(line_length, end - i);
        if (sums_dtype == Dtype::f64) {
          isa.decode64(from + i * runs.from[last], runs.from[last], count, line);
          for (int64_t j = 0; j < count; ++j) line[j] *= factor;
        } else {
          isa.decode[int(sums_dtype)](from + i * runs.from[last], runs.from[last], count, narrow);
          for (int64_t j = 0; j < count; ++j) line[j] = double(narrow[j]) * factor;
        }
        encode(line, count, to + i * runs.to[last], runs.to[last]);
      }
    }
  });
}

}  // namespace convgrad
