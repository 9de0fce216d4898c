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
  int64_t total = 1;
  for (const auto& axis : axes) {
    if (axis.count <= 0 || axis.stride < 0) return;  // nothing, or a reversed view: not worth it
    total *= axis.count;
  }
  std::sort(std::begin(axes), std::end(axes), [](const auto& a, const auto& b) { return a.stride > b.stride; });
  int64_t bytes = r.element;
  int outer = 4;
  while (outer > 0 && (axes[outer - 1].stride == bytes || axes[outer - 1].count == 1)) bytes *= axes[--outer].count;
  if (outer > 0 && axes[outer - 1].stride <= 64) {  // every second element and the like: take the lines in between too
    bytes = axes[outer - 1].stride * axes[outer - 1].count;
    --outer;
  }
  int64_t runs = 1;
  for (int axis = 0; axis < outer; ++axis) runs *= axes[axis].count;
  for (int64_t i = 0; i < runs; ++i) {
    const char* at = base;
    for (int64_t rest = i, axis = outer - 1; axis >= 0; --axis) {
      at += rest % axes[axis].count * axes[axis].stride;
      rest /= axes[axis].count;
    }
    runs_.push_back({at, bytes});
  }
  lines_ += runs * ((bytes + 63) / 64);
}

}  // namespace convgrad
