// The box: the part of an activation tensor that one tile of pixels reads through all its taps, packed once.
//
// Along one axis the tile's pixel o (0 <= o < length) reads through tap t the coordinate (o0 + o)*step + offset[t].
// Taps are sorted into runs so that pixel o finds its element at position base[t] + o: then a tap is one constant
// distance in the packed box, whatever the stride, dilation or padding. A run is an arithmetic progression of
// coordinates; taps share a run if their offsets agree modulo the step and their ranges touch.
#pragma once

#include <vector>

#include "conv.h"
#include "dense_pack.h"

namespace convgrad {

struct AxisRun {
  int64_t start;   // coordinate of position 0 when o0 = 0
  int64_t length;  // positions
  int64_t base;    // positions of the runs before it
};

struct AxisLayout {
  int64_t step = 1, length = 0;  // of the pixels
  std::vector<AxisRun> runs;
  std::vector<int> run_of_tap;
  std::vector<int64_t> position_of_tap;  // within its run
  int64_t positions = 0;                 // of all runs together
  int64_t longest = 0;
};

AxisLayout layout_axis(int64_t step, const std::vector<int64_t>& offsets, int64_t length);

// Three axes; a run of the innermost axis is a plane of its own, so that pixels of a row stay neighbours:
// position = ((run_w*depth + d)*height + h)*pitch + w.
struct BoxLayout {
  AxisLayout axis[3];
  int64_t depth = 0, height = 0, pitch = 0;

  // `pitch_multiple` rounds the rows up (zeros in between).
  BoxLayout() = default;
  BoxLayout(AxisLayout d, AxisLayout h, AxisLayout w, int64_t pitch_multiple);
  int64_t positions() const { return int64_t(axis[2].runs.size()) * depth * height * pitch; }
  int64_t tap_position(int64_t td, int64_t th, int64_t tw) const {
    const AxisLayout &d = axis[0], &h = axis[1], &w = axis[2];
    const int64_t row_d = d.runs[size_t(d.run_of_tap[size_t(td)])].base + d.position_of_tap[size_t(td)];
    const int64_t row_h = h.runs[size_t(h.run_of_tap[size_t(th)])].base + h.position_of_tap[size_t(th)];
    return ((w.run_of_tap[size_t(tw)] * depth + row_d) * height + row_h) * pitch + w.position_of_tap[size_t(tw)];
  }
};

// One activation tensor, seen by the packing.
struct Source {
  const char* data;  // of the image and of the first channel wanted
  int64_t channel_stride, stride[3];
  int64_t size[3];
  int64_t channels, channels_padded;
};

// Packs the box of the tile that starts at pixel o0; coordinates outside of the tensor become zeros. With a `panel`, so
// many channels at a time go to a box of their own, `panel_step` elements after the one before it.
template <typename T>
void pack_box(const Packer<T>& packer, const Source& source, const BoxLayout& layout, const int64_t (&o0)[3],
              Arrange arrange, T* dst, int64_t pitch, int64_t panel = INT64_MAX, int64_t panel_step = 0);

// Half-open range of tile pixels o in [0, length) whose coordinate (o0 + o)*step + offset lies in [0, size).
struct Range {
  int64_t first, last;
  bool empty() const { return first >= last; }
};
Range landing(int64_t o0, int64_t length, int64_t step, int64_t offset, int64_t size);

// Even cuts of an extent, not below `smallest` unless it is itself: ceil(extent / n) for n = 1, 2, 3, … Of an axis of many
// taps, whose layouts take long, only some of them.
std::vector<int64_t> cuts(int64_t extent, int64_t smallest, size_t taps);

// A distance between rows that a micro-kernel reads at the same time: a multiple of 512 bytes would put them all into a
// few sets of the first-level cache.
inline int64_t row_pitch(int64_t elements, int64_t element_bytes) {
  return elements * element_bytes % 512 ? elements : elements + 64 / element_bytes;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

}  // namespace convgrad
