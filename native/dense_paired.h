// The weight gradient for kernels that read B in pairs of k from L1: dw[k][c] sums dy[k][pixel] * x[pixel][c] over
// images and pixels, for every tap.
//
// A is dy, channels by pixels; B is x, pairs of pixels by channels, packed as a box in which a tap is a distance. An
// even distance is a number of whole pairs; for odd ones the box is kept a second time with its pairs shifted by a
// pixel. So only dy, which has no halo, is transposed from channels last, every tile is read aligned, and the sums of
// a tap lie as a weight with its input channels last wants them.
#pragma once

#include "dense_box.h"

namespace convgrad {

struct PairedGradient {
  Problem problem;
  const Gemm* gemm = nullptr;
  std::vector<int64_t> offsets[3];  // of the taps of each axis

  // The blocking.
  int64_t tile[3] = {}, tiles[3] = {};  // output pixels of a chunk
  int64_t images = 0;                   // of a chunk: small images are joined
  BoxLayout box;
  bool joined_rows = false;                 // sums run over the rows of a plane without a break, zeros of dy in gaps
  int64_t row_pitch = 0, entry = 0;         // positions of a row of dy, of what is summed without a break: row or plane
  int64_t in_block = 0, in_blocks = 0, out_block = 0, out_blocks = 0;
  int64_t groups = 1;                       // of a block: groups of few channels are packed side by side
  int64_t slices = 0, chunks = 0;           // of the reduction
  int64_t copies = 0;                       // of the box: 2 where a tap is an odd distance
  int64_t dy_pitch = 0, copy_elements = 0;  // of a row of A, of one copy of the box
  int64_t dy_plane = 0, box_plane = 0;      // bytes of one part
  int64_t sums_bytes = 0, slot_bytes = 0, partial_bytes = 0, bias_bytes = 0;

  PairedGradient(const Problem& problem, const Gemm* gemm);
  int64_t blocks() const { return ceil_div(problem.geo.G, groups) * in_blocks * out_blocks; }
  int64_t columns() const { return round_up(in_block, gemm->cols); }  // of the sums: one group's
  int64_t box_columns() const { return groups > 1 ? round_up(groups * problem.geo.group_in(), gemm->cols) : columns(); }
  int64_t entries(int64_t image_count, int64_t depth, int64_t height) const {
    return image_count * depth * (joined_rows ? 1 : height);
  }
  // Positions of an entry that a call sums, as even as whole steps allow.
  int64_t piece() const { return round_up(ceil_div(entry, ceil_div(entry, gemm->near_k)), gemm->k_multiple); }
  // Estimated cycles of one core, negative if `limit` bytes of workspace are too few.
  double choose_blocking(int64_t limit);
  std::string describe() const;

 private:
  bool lay_out(int64_t limit);
  double cycles(double cores) const;
};

// False if a NaN came out, or if operands in parts met values for which the parts do not suffice: the result is then
// not complete and must be computed in another way.
bool run_paired_gradient(const PairedGradient& plan, const Arguments& arguments);

}  // namespace convgrad
