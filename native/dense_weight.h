// The weight gradient: for every tap, dw[c][k] sums x[c][pixel through the tap] * dy[pixel][k] over images and pixels.
//
// The rows of A are channels of x, packed as a box with pixels contiguous: a tap is a distance in it. B is dy, pixels
// by result channels. Chunks of the reduction depend on the problem alone; their partial sums are added in order.
#pragma once

#include "dense_box.h"

namespace convgrad {

struct WeightGradient {
  Problem problem;
  const Gemm* gemm = nullptr;
  std::vector<int64_t> offsets[3];  // of the taps of each axis

  // The blocking.
  int64_t tile[3] = {}, tiles[3] = {};  // output pixels
  int64_t images = 0;                   // of a chunk: small images are joined
  BoxLayout box;
  bool joined_rows = false;  // sums run over the rows of a plane without a break, zeros of dy in the gaps
  int64_t in_block = 0, in_blocks = 0, row_panel = 0;  // channels of x: blocks, and rows of a micro-kernel call
  int64_t out_block = 0, out_blocks = 0;               // channels of dy
  int64_t slices = 0, chunks = 0;                      // of the reduction
  int64_t box_bytes = 0, dy_bytes = 0, sums_bytes = 0, slot_bytes = 0, partial_bytes = 0, bias_bytes = 0;
  int64_t box_plane() const { return box_bytes / gemm->parts; }  // bytes of one part
  int64_t dy_plane() const { return dy_bytes / gemm->parts; }

  WeightGradient(const Problem& problem, const Gemm* gemm);
  // Elements that a micro-kernel may read past the box; they are zeros.
  int64_t slack() const { return 2 * (gemm->k_multiple + box.pitch); }
  int64_t blocks() const { return problem.geo.G * in_blocks * out_blocks; }
  double choose_blocking(int64_t element_bytes, int64_t limit, int64_t& minimum);
  std::string describe() const;
};

// False if operands in parts met values for which the parts do not suffice: the result is then not complete.
template <typename T>
bool run_weight_gradient(const WeightGradient& plan, const Arguments& arguments);

}  // namespace convgrad
