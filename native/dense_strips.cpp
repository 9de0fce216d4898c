// Strips, see dense_strips.h.
#include "dense_strips.h"

#include <algorithm>

namespace convgrad {

StripCutter::TapRange StripCutter::landing_taps(const Correlation& plan, const Phase& phase, int axis, int64_t origin,
                                                int64_t count) {
  const std::vector<int>& list = phase.axis[axis]->taps;
  TapRange range{0, 0, true};
  for (size_t i = 0; i < list.size(); ++i) {
    const Range pixels = landing(origin, count, plan.taps[axis].step, plan.taps[axis].offset[size_t(list[i])],
                                 plan.source_size[axis]);
    if (pixels.empty()) continue;
    if (range.first == range.last) range.first = int(i);
    range.last = int(i) + 1;
    range.whole &= pixels.first == 0 && pixels.last == count;
  }
  return range;
}

size_t StripCutter::tap_set(const TapRange& d, const TapRange& h, const TapRange& w) {
  const TapSet set = {{d.first, h.first, w.first}, {d.last, h.last, w.last}, d.whole && h.whole && w.whole};
  for (size_t i = 0; i < tap_sets_.size(); ++i) {
    bool same = tap_sets_[i].whole == set.whole;
    for (int axis = 0; axis < 3; ++axis)
      same &= tap_sets_[i].first[axis] == set.first[axis] && tap_sets_[i].last[axis] == set.last[axis];
    if (same) return i;
  }
  tap_sets_.push_back(set);
  return tap_sets_.size() - 1;
}

// The columns between which the set of landing taps changes: where a tap begins or ceases to land.
void StripCutter::find_segments(const Correlation& plan, const Phase& phase, int64_t origin, int64_t length) {
  edges_.assign(1, 0);
  for (int tap : phase.axis[2]->taps) {
    const Range pixels =
        landing(origin, length, plan.taps[2].step, plan.taps[2].offset[size_t(tap)], plan.source_size[2]);
    edges_.push_back(pixels.first);
    edges_.push_back(pixels.last);
  }
  std::sort(edges_.begin(), edges_.end());
  edges_.push_back(length);
  for (size_t i = 0; i + 1 < edges_.size(); ++i) {
    const int64_t count = edges_[i + 1] - edges_[i];
    if (count == 0) continue;
    const TapRange taps = landing_taps(plan, phase, 2, origin + edges_[i], count);
    if (!segments_.empty() && segments_.back().taps == taps) {
      segments_.back().count += count;
    } else {
      segments_.push_back({edges_[i], count, taps});
    }
  }
}

// Plane by plane, by whichever of three ways costs least: running over the rows without a break (positions between rows
// are dropped), row by row with only the taps that land in that row, or also by the columns where the set of landing taps
// changes.
void StripCutter::cut(const Correlation& plan, const Phase& phase, const int64_t (&origin)[3],
                      const int64_t (&length)[3], bool rows_touch) {
  const int64_t most = plan.pixels_are_rows ? plan.gemm->max_rows : plan.gemm->cols;
  const int64_t unit = plan.pixels_are_rows ? (most == 32 ? 16 : 1) : plan.gemm->run_half ? most / 2 : most;
  const double fixed = plan.pixels_are_rows && unit == 1 ? 0.6 : 0.04 * double(most);
  auto cost = [&](int64_t count, const TapRange& h, const TapRange& w) {
    // Fewer than four rows of sums wait for each other's results.
    const double rows = double(std::max<int64_t>(round_up(count, unit), 4)) + double(ceil_div(count, most)) * fixed;
    return rows * (h.last - h.first) * (w.last - w.first);
  };
  strips_.clear();
  tap_sets_.clear();
  auto add = [&](int64_t depth, int64_t from, int64_t count, size_t taps) {
    const int64_t size = plan.pixels_are_rows ? round_up(ceil_div(count, ceil_div(count, most)), unit) : most;
    for (int64_t i = 0; i < count; i += size) strips_.push_back({depth, from + i, std::min(size, count - i), taps});
  };
  const TapRange all_h = landing_taps(plan, phase, 1, origin[1], length[1]);
  const TapRange all_w = landing_taps(plan, phase, 2, origin[2], length[2]);
  const int64_t joined = (length[1] - 1) * plan.box.pitch + length[2];
  rows_.clear();
  double row_cost = 0;
  const double joined_cost = cost(joined, all_h, all_w);
  for (int64_t row = 0; row < length[1]; ++row) {
    rows_.push_back(landing_taps(plan, phase, 1, origin[1] + row, 1));
    row_cost += cost(length[2], rows_.back(), all_w);
  }
  segments_.clear();
  double segment_cost = 0;
  if (!all_w.whole) {
    find_segments(plan, phase, origin[2], length[2]);
    for (const TapRange& row : rows_)
      for (const Segment& segment : segments_) segment_cost += cost(segment.count, row, segment.taps);
  }
  if (segments_.empty() || row_cost <= segment_cost) {
    segments_.assign(1, {0, length[2], all_w});
    segment_cost = row_cost;
  }
  for (int64_t depth = 0; depth < length[0]; ++depth) {
    const TapRange d = landing_taps(plan, phase, 0, origin[0] + depth, 1);
    const int64_t plane = depth * plan.box.height * plan.box.pitch;
    if (joined_cost <= segment_cost && rows_touch) {
      add(depth, plane, joined, tap_set(d, all_h, all_w));
      continue;
    }
    for (int64_t row = 0; row < length[1]; ++row)
      for (const Segment& segment : segments_)
        add(depth, plane + row * plan.box.pitch + segment.first, segment.count,
            tap_set(d, rows_[size_t(row)], segment.taps));
  }
}

}  // namespace convgrad
