// Depthwise convolutions along one axis whose pixels lie together: the pixels of a line are the lanes.
#pragma once

#include "lanes.h"

namespace convgrad {

inline constexpr int64_t fewest_long_taps = 9;  // from here on sums are shifted instead of pixels, with AVX-512

// Lines of a correlation with stride 1: to[j] = sum over taps s of weights[s] * from[j - pad + s*step].
struct LineCorrelation {
  ElementCode operand, result;
  const char* from;               // the first line; `lines` of them, this far apart
  char* to;
  int64_t from_line, to_line, lines;
  int64_t from_size, to_size;     // pixels
  const float* weights;           // [line][tap], all finite
  int64_t taps, step, pad;
  bool backwards;                 // sum from the last tap to the first
  bool stream;
  float* scratch;                 // scratch_floats() of them, twice as many for pairs of bf16
  [[gnu::always_inline]] int64_t scratch_floats() const { return to_size + (taps - 1) * step + 8 * most_lanes; }
};

// Lines of a weight gradient with stride 1: sums[s] += sum over q of dy[q] * x[q - pad + s*step], and the sum of dy.
struct LineWeightGrad {
  ElementCode operand;
  const char *x, *dy;
  int64_t x_line, dy_line, lines;
  int64_t x_size, dy_size;
  int64_t taps, step, pad;
  bool bias;
  float* sums;     // [line][tap, then bias]
  float* scratch;  // x_size + dy_size floats
};

CONVGRAD_PER_ISA(void correlate_lines(const LineCorrelation& job);
                 void weight_grad_lines(const LineWeightGrad& job);)
// For bf16 operands, where vdpbf16ps is fast; correlations of many taps.
namespace avx512_bf16 {
void correlate_lines(const LineCorrelation& job);
void weight_grad_lines(const LineWeightGrad& job);
}

}  // namespace convgrad
