// The weight gradient as one product of matrices: dw[k][p] sums dy[k][pixel] * x[pixel][p], where p counts the elements
// of a pixel's window. For windows that lie inside of the tensor and have long runs of neighbours in memory.
//
// Rows of A are channels of dy, pixels contiguous; a row of B is the window of a pixel, copied run by run. A task has a
// block of channels and a block of the window, and sums over all pixels, a chunk of rows of them at a time.
#pragma once

#include "dense_box.h"

namespace convgrad {

struct WindowGradient {
  Problem problem;
  const Gemm* gemm = nullptr;
  bool columns = false;  // a run has the columns of a window (channels first), else the channels of a pixel

  // The blocking.
  int64_t out_block = 0, out_blocks = 0, window_block = 0, window_blocks = 0;  // channels of dy; elements of the window
  int64_t chunk_rows = 0, row_positions = 0;  // rows of output pixels; positions of one, a multiple of k_multiple
  int64_t dy_pitch = 0;                       // elements from one channel of packed dy to the next
  int64_t dy_bytes = 0, window_bytes = 0, sums_bytes = 0, slot_bytes = 0;

  WindowGradient(const Problem& problem, const Gemm* gemm);
  int64_t window() const { return problem.geo.C * problem.geo.taps(); }
  int64_t rows() const { return problem.geo.N * problem.geo.out[0] * problem.geo.out[1]; }
  int64_t tasks() const { return out_blocks * window_blocks; }
  int64_t rows_of(int64_t pixels) const;
  // Whether dy of these strides can be read where it lies: its planes are runs of pixels, all of one length.
  bool reads_in_place(const int64_t* y, int64_t element_bytes) const;
  // The estimated cycles of one core; negative if this is no way for the problem.
  double choose_blocking(int64_t element_bytes, int64_t limit);
  std::string describe() const;
};

template <typename T>
void run_window_gradient(const WindowGradient& plan, const Arguments& arguments);

}  // namespace convgrad
