// Depthwise convolutions along one axis whose pixels lie together: the pixels of a line are the lanes.
#pragma once

#include "lanes.h"

namespace convgrad {

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
  float* scratch;                 // scratch_floats() of them
  int64_t scratch_floats() const { return to_size + (taps - 1) * step + 8 * most_lanes; }
};

CONVGRAD_PER_ISA(void correlate_lines(const LineCorrelation& job);)

}  // namespace convgrad
