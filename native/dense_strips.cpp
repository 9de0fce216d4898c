// Strips, see dense_strips.h.
#include "dense_strips.h"

#include <algorithm>

namespace convgrad {

void ResultRows::locate(const Correlation& plan, const Phase& phase, const std::vector<Strip>& strips,
                        const Tensor& result, const int64_t (&origin)[3], const int64_t (&length)[3]) {
  const AxisPhase &pd = *phase.axis[0], &ph = *phase.axis[1], &pw = *phase.axis[2];
  const int64_t pitch = plan.box.pitch;
  rows_.clear();
  first_.assign(1, 0);
  for (const Strip& strip : strips) {
    const int64_t plane = (pd.first + (origin[0] + strip.depth) * pd.stride) * result.stride[axis_d];
    const int64_t start = strip.position - strip.depth * plan.box.height * pitch, last = start + strip.count;
    for (int64_t at = start; at < last;) {
      const int64_t row = at / pitch, column = at % pitch, next = std::min(last, (row + 1) * pitch);
      const int64_t count = std::min(next - at, length[2] - column);
      if (count > 0)
        rows_.push_back({at - start, count,
                         plane + (ph.first + (origin[1] + row) * ph.stride) * result.stride[axis_h] +
                             (pw.first + (origin[2] + column) * pw.stride) * result.stride[axis_w]});
      at = next;
    }
    first_.push_back(rows_.size());
  }
}

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
  const TapSet set = {{d.first, h.first, w.first}, {d.last, h.last, w.last}};
  const auto found = std::find(tap_sets_.begin(), tap_sets_.end(), set);
  if (found != tap_sets_.end()) return size_t(found - tap_sets_.begin());
  tap_sets_.push_back(set);
  return tap_sets_.size() - 1;
}

void StripCutter::add(int64_t depth, int64_t position, int64_t count, const TapRange& d, const TapRange& h,
                      const TapRange& w) {
  strips_.push_back({depth, position, count, pieces_.size(), 1, d.whole && h.whole && w.whole});
  pieces_.push_back({0, count, tap_set(d, h, w)});
}

// Even strips of a row. Taps that land for the same pixels of a strip are one piece; offsets rise or fall with the tap,
// so they are neighbours. Sums start with the piece that has all pixels, if need be one without taps.
void StripCutter::find_row_strips(const Correlation& plan, const Phase& phase, int64_t origin, int64_t length) {
  row_strips_.clear();
  const std::vector<int>& taps = phase.axis[2]->taps;
  const int64_t size = ceil_div(length, ceil_div(length, plan.gemm->max_rows));
  for (int64_t first = 0; first < length; first += size) {
    RowStrip strip{first, std::min(size, length - first), {}};
    strip.pieces.push_back({0, strip.count, {0, 0, true}});
    for (int tap = 0; tap < int(taps.size()); ++tap) {
      const Range pixels = landing(origin + first, strip.count, plan.taps[2].step,
                                   plan.taps[2].offset[size_t(taps[size_t(tap)])], plan.source_size[2]);
      if (pixels.empty()) continue;
      const bool all = pixels.first == 0 && pixels.last == strip.count;
      Segment& last = all ? strip.pieces.front() : strip.pieces.back();
      if (last.taps.last == tap && last.first == pixels.first && last.first + last.count == pixels.last) {
        last.taps.last = tap + 1;
      } else if (all) {
        last.taps = {tap, tap + 1, true};
      } else {
        strip.pieces.push_back({pixels.first, pixels.last - pixels.first, {tap, tap + 1, true}});
      }
    }
    row_strips_.push_back(std::move(strip));
  }
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
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  if (4 * int64_t(edges_.size()) > length) return;  // of few pixels each: too many strips, and long to find
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

// Plane by plane, by whichever way costs least: running over the rows without a break (positions between rows are
// dropped); row by row with only the taps that land in that row; or also by the columns where the set of landing taps
// changes: as strips of their own, or, where pixels are rows of a kernel that takes any number of them, as pieces.
void StripCutter::cut(const Correlation& plan, const Phase& phase, const int64_t (&origin)[3],
                      const int64_t (&length)[3], bool rows_touch, bool direct) {
  const int64_t most = plan.pixels_are_rows ? plan.gemm->max_rows : plan.gemm->cols;
  const int64_t unit = plan.pixels_are_rows ? (most == 32 ? 16 : 1) : plan.gemm->run_half ? most / 2 : most;
  const bool by_pieces = plan.pixels_are_rows && unit == 1, on_tiles = plan.pixels_are_rows && unit == 16;
  const double fixed = by_pieces ? 0.3 + 40.0 / double(plan.channel_block) : 0.04 * double(most);
  auto cost = [&](int64_t count, const TapRange& h, const TapRange& w) {
    // Fewer than three rows of sums wait for each other's results. To bring the weight from L2 takes a kernel on tiles
    // as long as the products of so many rows: 14 strips of 14 rows take longer than 7 of 32, a few of them dropped.
    const int64_t last = (count + most - 1) % most + 1, least = on_tiles ? 22 : 3;
    const double rows = double(round_up(count, unit) + std::max<int64_t>(least - round_up(last, unit), 0)) +
                        double(ceil_div(count, most)) * fixed;
    return rows * (h.last - h.first) * (w.last - w.first);
  };
  strips_.clear();
  pieces_.clear();
  tap_sets_.clear();
  auto add_strips = [&](int64_t depth, int64_t from, int64_t count, const TapRange& d, const TapRange& h,
                        const TapRange& w) {
    const int64_t size = plan.pixels_are_rows ? round_up(ceil_div(count, ceil_div(count, most)), unit) : most;
    for (int64_t i = 0; i < count; i += size) add(depth, from + i, std::min(size, count - i), d, h, w);
  };
  const TapRange all_h = landing_taps(plan, phase, 1, origin[1], length[1]);
  const TapRange all_w = landing_taps(plan, phase, 2, origin[2], length[2]);
  const int64_t joined = (length[1] - 1) * plan.box.pitch + length[2];
  rows_.clear();
  double row_cost = 0, segment_cost = 0;
  const double joined_cost = cost(joined, all_h, all_w);
  for (int64_t row = 0; row < length[1]; ++row) {
    rows_.push_back(landing_taps(plan, phase, 1, origin[1] + row, 1));
    row_cost += cost(length[2], rows_.back(), all_w);
  }
  segments_.clear();
  if (by_pieces) {
    find_row_strips(plan, phase, origin[2], length[2]);
    for (const TapRange& row : rows_)
      for (const RowStrip& strip : row_strips_)
        for (const Segment& piece : strip.pieces) segment_cost += cost(piece.count, row, piece.taps);
  } else {
    if (!all_w.whole) {
      find_segments(plan, phase, origin[2], length[2]);
      for (const TapRange& row : rows_)
        for (const Segment& segment : segments_) segment_cost += cost(segment.count, row, segment.taps);
    }
    if (segments_.empty() || row_cost <= segment_cost) {
      segments_.assign(1, {0, length[2], all_w});
      segment_cost = row_cost;
    }
  }
  const bool join = rows_touch && joined_cost <= segment_cost && !(direct && !(all_h.whole && all_w.whole));
  for (int64_t depth = 0; depth < length[0]; ++depth) {
    const TapRange d = landing_taps(plan, phase, 0, origin[0] + depth, 1);
    const int64_t plane = depth * plan.box.height * plan.box.pitch;
    if (join) {
      add_strips(depth, plane, joined, d, all_h, all_w);
      continue;
    }
    for (int64_t row = 0; row < length[1]; ++row) {
      const int64_t start = plane + row * plan.box.pitch;
      const TapRange& h = rows_[size_t(row)];
      for (const Segment& segment : segments_)
        add_strips(depth, start + segment.first, segment.count, d, h, segment.taps);
      for (const RowStrip& strip : row_strips_) {
        add(depth, start + strip.first, strip.count, d, h, strip.pieces[0].taps);
        for (size_t i = 1; i < strip.pieces.size(); ++i)
          pieces_.push_back({strip.pieces[i].first, strip.pieces[i].count, tap_set(d, h, strip.pieces[i].taps)});
        strips_.back().pieces = strip.pieces.size();
      }
    }
  }
}

}  // namespace convgrad
