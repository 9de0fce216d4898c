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
struct LanePhase {
  int64_t first, step;
  int64_t taps, tap_first, tap_step;
  int64_t source, source_step, source_tap_step;
};

// The sum over channels and taps of one box of destination pixels. `slab` and `weights` are in lane form, in one of
// three pairings of source and destination:
//   lane by lane  each group has its lane in both; `passes` blocks of lanes are done one after the other
//   broadcast     the slab has one lane, every destination lane (`parts` blocks of them) reads it
//   reduce        destination lanes are summed into one when a row is stored
struct LaneCorrelation {
  bool broadcast, reduce;
  int64_t passes, parts;  // parts: destination vectors of a pixel (channels of the group, or blocks where broadcast)
  PixelBox source_box;    // what `slab` holds, densely
  const void* slab;
  const void* weights;  // [pass][part][source channel][t][r][s][lane] or in another order, by these steps (vectors)
  int64_t weight_pass, weight_to, weight_from, weight_tap[3];
  const bool* finite;  // per pass: weights that hold Inf or NaN must visit no padded position
  int64_t source_size[3];
  int64_t source_channels;
  const LanePhase* phase[3];
  int64_t phases[3];
  PixelBox to_box;
  LanePlanes to;
  int64_t images, slab_image;  // images > 1: tiles run over images (`slab_image` elements apart), not along x
  int64_t batch;               // rows (or images) computed together before they are stored
  void* rows;                  // scratch of passes * parts * batch * to_box.extent[2] vectors
};

// The products of a box of output gradients with the inputs it reaches, added to `sums`. Either slab may have one lane
// only, which then meets all lanes of the other.
struct LaneWeightGrad {
  const Geometry* geo;
  PixelBox x_box, dy_box;  // dense slabs
  const void *x, *dy;
  bool x_broadcast, dy_broadcast;
  int64_t out_parts, in_parts;    // vectors (or scalars, where broadcast) of a pixel of dy and of x
  int64_t images, x_image, dy_image;  // images in the slabs and elements between them; one unless dy has one plane
  void* sums;                     // [out part][in part][taps][lane]
  int64_t sum_step;               // in parts from one out part to the next; at least in_parts
  bool dy_finite;                 // padded x may be multiplied by dy
  // Where they are given (x_line > 0): elements from one row, part and output pixel of x to the next, and from the
  // first pixel of a row to each column of taps; pixels of a row of dy. A pixel may be a pair, see few_pairs.h.
  int64_t x_line, x_part, x_step, columns, dy_width;
  const int64_t* column;
  int* shape;  // of the tiles, chosen by the first box of several; null: chosen for each
};

CONVGRAD_PER_ISA(void load_lanes(const LanePlanes& from, const PixelBox& box, const int64_t* size, void* slab);
                 void correlate_lanes(const LaneCorrelation& job);
                 void weight_grad_lanes(const LaneWeightGrad& job, bool f64);
                 bool finite_lanes(const void* slab, int64_t vectors, bool f64);
                 void sum_lanes(const void* slab, int64_t channels, int64_t vectors, void* sums, bool f64);)

namespace avx512_bf16 {
// A broadcast `job` whose slab and weights are words of two bf16: one product takes two taps along x.
void correlate_pairs(const LaneCorrelation& job);
}

}  // namespace convgrad
