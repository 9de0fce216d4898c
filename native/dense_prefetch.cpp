// Prefetching, see dense_prefetch.h.
#include "dense_prefetch.h"

#include <cstdlib>

namespace convgrad {

void Prefetch::add(const Region& r) {
  // Axes from the widest stride to the narrowest; those that touch each other at the inside become one run.
  struct {
    int64_t stride, count;
  } axes[4] = {{r.channel_stride, r.channels},
               {r.stride[0], r.last[0] - r.first[0]},
               {r.stride[1], r.last[1] - r.first[1]},
               {r.stride[2], r.last[2] - r.first[2]}};
  const char* base = r.data;
  for (int axis = 0; axis < 3; ++axis) base += r.first[axis] * r.stride[axis];
  for (const auto& axis : axes)
    if (axis.count <= 0 || axis.stride < 0) return;  // nothing, or a reversed view: not worth it
  std::sort(std::begin(axes), std::end(axes), [](const auto& a, const auto& b) { return a.stride > b.stride; });
  int64_t bytes = r.element;
  int outer = 4;
  while (outer > 0 && (axes[outer - 1].stride == bytes || axes[outer - 1].count == 1)) bytes *= axes[--outer].count;
  if (outer > 0 && axes[outer - 1].stride <= 64) {  // every second element and the like: take the lines in between too
    bytes = axes[outer - 1].stride * axes[outer - 1].count;
    --outer;
  }
  // At most four axes, of which the outer ones are walked.
  int64_t count[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};
  for (int axis = 0; axis < outer; ++axis) {
    count[4 - outer + axis] = axes[axis].count;
    stride[4 - outer + axis] = axes[axis].stride;
  }
  const size_t before = runs_.size();
  for (int64_t i = 0; i < count[0]; ++i)
    for (int64_t j = 0; j < count[1]; ++j)
      for (int64_t k = 0; k < count[2]; ++k) {
        const char* at = base + i * stride[0] + j * stride[1] + k * stride[2];
        for (int64_t n = 0; n < count[3]; ++n, at += stride[3]) {
          const int64_t before_line = int64_t(reinterpret_cast<uintptr_t>(at) % 64);
          runs_.push_back({at - before_line, bytes + before_line});
        }
      }
  lines_ += int64_t(runs_.size() - before) * ((bytes + 63) / 64);
}

}  // namespace convgrad
