// Convolution (wrt output) and the input gradient as one thing: a correlation of an activation tensor with the weight.
//
// Result pixel j (per axis) sums over taps the source pixel j*step + offset[tap]. The forward has one phase, step =
// stride. The input gradient has one phase per residue of the input coordinate modulo the stride (those that a tap
// reaches): inside a phase step = 1 and only the landing taps are visited, so nothing is ever multiplied with an
// inserted zero.
#pragma once

#include <algorithm>
#include <memory>

#include "dense_box.h"

namespace convgrad {

// The taps of one axis: kernel index and offset; the forward's step.
struct AxisTaps {
  int64_t step = 1;
  std::vector<int64_t> kernel_index, offset;
};

// One phase of one axis: result coordinate = first + j*stride for j in [0, count), and its taps (into AxisTaps).
struct AxisPhase {
  int64_t first, stride, count;
  std::vector<int> taps;
};

struct Phase {
  const AxisPhase* axis[3];
  int64_t tap_count, tap_base;  // in the packed weight
};

struct Correlation {
  Problem problem;
  int64_t reduced = 0, results = 0;  // channels per group that are summed over, that result
  int64_t source_size[3] = {};
  AxisTaps taps[3];
  std::vector<AxisPhase> axis_phases[3];
  std::vector<Phase> phases;
  bool zeros_first = false;  // some result pixels belong to no phase
  int64_t extent[3] = {};    // pixels of the largest phase per axis
  int64_t tap_total = 0;

  // The blocking.
  const Gemm* gemm = nullptr;
  bool pixels_are_rows = false;  // channels-last source: pixels are rows of A; else pixels are columns of B
  int64_t tile[3] = {}, tiles[3] = {};
  BoxLayout box;
  int64_t channel_block = 0, channel_blocks = 0, channel_pad = 0;  // of the summed channels
  int64_t panel = 0, panels = 0, panels_block = 0, blocks = 0;     // of the result channels
  // A panel is used by one task only, which packs so many of them at a time for itself: they never leave the cache.
  int64_t own_panels = 0;
  // All panels of a task stay in L2: a strip of pixels meets one after the other while it is in L1.
  bool strips_outside = false;
  int64_t weight_bytes = 0, box_bytes = 0, sums_bytes = 0, slot_bytes = 0;  // none where no tap lands
  int64_t weight_plane = 0, box_plane = 0;  // bytes of one part of the packed weight, of the box

  Correlation(const Problem& problem, const Gemm* gemm);
  Correlation(const Correlation&) = delete;  // phases point into axis_phases
  int64_t tasks() const { return problem.geo.N * problem.geo.G * blocks * tiles[0] * tiles[1] * tiles[2]; }
  // Tiles read the weight of all taps for a few summed channels at a time: so it is packed.
  bool taps_inside() const { return pixels_are_rows && gemm->near_k > 0; }
  // Whether no two taps of a phase read the same pixel, and none reads beside the tensor: then tiles, which share
  // pixels in L1 and take them without looking where a tap lands, gain nothing by packing.
  bool taps_lie_apart() const;
  // Panels that lie side by side in memory, so that packing them together reads runs of half a kibibyte.
  int64_t panels_together() const {
    const int64_t size = size_of(problem.dtype);
    const int64_t result_stride = problem.w_nominal[problem.wrt & wrt_output ? axis_o : axis_i];
    return result_stride == size ? std::max<int64_t>(1, 512 / (gemm->cols * size)) : 1;
  }
  int64_t result_bytes() const {
    const Geometry& geo = problem.geo;
    const bool forward = problem.wrt & wrt_output;
    return geo.N * (forward ? geo.K * geo.out_pixels() : geo.C * geo.in_pixels()) * size_of(problem.out_dtype);
  }
  int64_t padded(int64_t channels) const { return round_up(channels, gemm->k_multiple); }

  // Chooses orientation, tiles and blocks; returns the estimated cycles of one core, negative if `limit` bytes of
  // workspace are too few (`minimum` then says what is needed).
  double choose_blocking(int64_t element_bytes, int64_t limit, int64_t& minimum);
  std::string describe() const;
};

// False if operands in parts met values for which the parts do not suffice: the result is then not complete.
template <typename T>
bool run_correlation(const Correlation& correlation, const Arguments& arguments);

}  // namespace convgrad
