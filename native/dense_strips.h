// Cutting the pixels of a tile into strips: the calls of the micro-kernel, each with the taps that land for its pixels.
#pragma once

#include "dense_correlate.h"

namespace convgrad {

// Neighbouring positions of the box, the pixels of one micro-kernel call (some of them may be no pixel).
struct Strip {
  int64_t depth, position, count;
  size_t taps;  // index of its TapSet
};

// The taps that land for some pixels: ranges of positions in the phase's lists of taps.
struct TapSet {
  int first[3], last[3];
  bool whole;  // every tap of the set lands for every pixel it is used for
};

class StripCutter {
 public:
  // The pixels of the tile at `origin`; `rows_touch`: a strip may run over the rows of a plane.
  void cut(const Correlation& plan, const Phase& phase, const int64_t (&origin)[3], const int64_t (&length)[3],
           bool rows_touch);
  const std::vector<Strip>& strips() const { return strips_; }
  const std::vector<TapSet>& tap_sets() const { return tap_sets_; }

 private:
  // Taps of one axis that land for at least one of some pixels: a range, because offsets rise or fall with the tap.
  struct TapRange {
    int first, last;
    bool whole;
    bool operator==(const TapRange&) const = default;
  };
  struct Segment {
    int64_t first, count;
    TapRange taps;
  };
  static TapRange landing_taps(const Correlation& plan, const Phase& phase, int axis, int64_t origin, int64_t count);
  size_t tap_set(const TapRange& d, const TapRange& h, const TapRange& w);
  void find_segments(const Correlation& plan, const Phase& phase, int64_t origin, int64_t length);

  std::vector<Strip> strips_;
  std::vector<TapSet> tap_sets_;
  std::vector<TapRange> rows_;
  std::vector<Segment> segments_;
  std::vector<int64_t> edges_;
};

}  // namespace convgrad
