// Activations in "lane form": [block][channel][z][y][x][lane], one vector per pixel, lanes are independent planes.
//
// A lane is one group of one image. In this form depthwise and small-group convolutions are dense vector code whatever
// the layout of the tensor: no lane ever meets another, a stride is a pointer step, a short row wastes nothing.
// The plain structs here cross the border between the planners and the code compiled per instruction set.
#pragma once

#include "conv.h"
#include "simd.h"

namespace convgrad {

inline constexpr int most_lanes = 16, most_batch = 16;

// How the lines of one tensor are decoded or encoded.
struct ElementCode {
  Dtype dtype;
  DecodeLine decode;
  DecodeLine64 decode64;
  RoundLine round;  // null: nothing to round
  EncodeLine encode;
  EncodeLine64 encode64;
};

// The planes of a tensor that fill the lanes of `blocks` vectors. Lane l of block b starts offset[l] + b*block_step
// bytes after `data`; the last block may be short of lanes.
struct LanePlanes {
  char* data;
  const int64_t* stride;  // bytes, canonical axes
  ElementCode code;
  int64_t channels;  // per group
  int64_t blocks;
  int64_t planes;    // lanes in use, over all blocks
  int64_t offset[most_lanes];
  int64_t lane_step, block_step;  // bytes; lane_step is 0 where lanes are not evenly spaced
  bool stream;                    // a result too large for the caches: write around them where that is possible

  int lanes(int64_t block, int most) const {
    const int64_t left = planes - block * most;
    return int(left < most ? left : most);
  }
};

// A box of pixels of a tensor. On z and y it lies inside the tensor; on x it may stick out: those pixels read as zero.
struct PixelBox {
  int64_t first[3], extent[3];
};

// One residue class of destination positions along an axis and the taps that reach it. The j-th position of the class
// is first + j*step; its m-th tap is tap_first + m*tap_step and reads source + j*source_step + m*source_tap_step.
struct AxisPhase {
  int64_t first, step;
  int64_t taps, tap_first, tap_step;
  int64_t source, source_step, source_tap_step;
};

// The sum over channels and taps of one box of destination pixels; `slab` and `weights` are in lane form.
struct LaneCorrelation {
  PixelBox source_box;  // what `slab` holds, densely
  const void* slab;
  const void* weights;  // [block][group_out][group_in][t][r][s][lane]
  int64_t weight_block, weight_to, weight_from, weight_tap[3];  // vectors between blocks, channels, taps
  const bool* finite;  // per block: weights that hold Inf or NaN must visit no padded position
  int64_t source_size[3];
  int64_t source_channels;
  const AxisPhase* phase[3];
  int64_t phases[3];
  PixelBox to_box;
  LanePlanes to;
  int64_t batch;  // rows computed together before they leave lane form, at most `most_batch`
  void* rows;     // scratch of to.blocks * to.channels * batch * to_box.extent[2] vectors
};

// The products of a box of output gradients with the inputs it reaches, added to `sums` (and `bias_sums`).
struct LaneWeightGrad {
  const Geometry* geo;
  PixelBox x_box, dy_box;  // dense slabs
  const void *x, *dy;
  void* sums;       // [group_out][group_in][taps][lane]
  bool dy_finite;  // padded x may be multiplied by dy
};

CONVGRAD_PER_ISA(void load_lanes(const LanePlanes& from, const PixelBox& box, const int64_t* size, void* slab);
                 void correlate_lanes(const LaneCorrelation& job);
                 void weight_grad_lanes(const LaneWeightGrad& job, bool f64);
                 bool finite_lanes(const void* slab, int64_t vectors, bool f64);
                 void sum_lanes(const void* slab, int64_t channels, int64_t vectors, void* sums, bool f64);)

}  // namespace convgrad
