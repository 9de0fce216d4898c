// Cutting the pixels of a tile into strips: the calls of the micro-kernel, each with the taps that land for its pixels.
#pragma once

#include "dense_correlate.h"

namespace convgrad {

// Neighbouring positions of the box whose sums are one tile (some of them may be no pixel).
struct Strip {
  int64_t depth, position, count;
  size_t piece, pieces;  // its pieces in the list of all
  bool whole;            // every tap lands for every pixel it is used for
};

// One call of the micro-kernel: some pixels of a strip, with the taps that they share.
struct Piece {
  int64_t first, count;
  size_t taps;  // index of its TapSet
};

// The taps that land for some pixels: ranges of positions in the phase's lists of taps.
struct TapSet {
  int first[3], last[3];
  bool operator==(const TapSet&) const = default;
};

// Pixels of a strip that follow each other in a row of the result.
struct ResultRow {
  int64_t from, count, offset;  // the first one's number in the strip; bytes from the image's first result on
};

// The rows of all strips of a tile: where they lie is the same for every panel of result channels.
class ResultRows {
 public:
  void locate(const Correlation& plan, const Phase& phase, const std::vector<Strip>& strips, const Tensor& result,
              const int64_t (&origin)[3], const int64_t (&length)[3]);
  template <typename Body>
  void each(size_t strip, Body&& body) const {
    for (size_t i = first_[strip]; i < first_[strip + 1]; ++i) body(rows_[i]);
  }

 private:
  std::vector<ResultRow> rows_;
  std::vector<size_t> first_;  // of every strip
};

class StripCutter {
 public:
  // The pixels of the tile at `origin`; `rows_touch`: a strip may run over the rows of a plane; `direct`: the source is
  // read where it lies, without zeros beside it.
  void cut(const Correlation& plan, const Phase& phase, const int64_t (&origin)[3], const int64_t (&length)[3],
           bool rows_touch, bool direct);
  const std::vector<Strip>& strips() const { return strips_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
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
  // A strip of a row whose taps do not all land for all of its pixels: several calls add to the same sums.
  struct RowStrip {
    int64_t first, count;
    std::vector<Segment> pieces;  // from the strip's first pixel on; the first piece is the whole strip
  };
  static TapRange landing_taps(const Correlation& plan, const Phase& phase, int axis, int64_t origin, int64_t count);
  size_t tap_set(const TapRange& d, const TapRange& h, const TapRange& w);
  void find_segments(const Correlation& plan, const Phase& phase, int64_t origin, int64_t length);
  void find_row_strips(const Correlation& plan, const Phase& phase, int64_t origin, int64_t length);
  void add(int64_t depth, int64_t position, int64_t count, const TapRange& d, const TapRange& h, const TapRange& w);

  std::vector<Strip> strips_;
  std::vector<Piece> pieces_;
  std::vector<TapSet> tap_sets_;
  std::vector<RowStrip> row_strips_;
  std::vector<TapRange> rows_;
  std::vector<Segment> segments_;
  std::vector<int64_t> edges_;
};

}  // namespace convgrad
