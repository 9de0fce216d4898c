// The bias gradient: sums of dy per output channel.
#pragma once

#include "conv.h"

namespace convgrad {

// Adds the sums over the outputs [first, last) of each axis of one image to total[k] for `channels` channels from dy's
// `channel` on. Lines are summed in f32, the lines' sums in double, in an order that the arguments fix.
struct BiasPart {
  int64_t image, channel, channels;
  int64_t first[3], last[3];
};
void add_bias(const Problem& problem, const Tensor& dy, const BiasPart& part, double* total);

// The same for a box of outputs, `length` from `origin` on, of `images` images from `part.image` on.
void add_bias_of_box(const Problem& problem, const Tensor& dy, BiasPart part, int64_t images, const int64_t (&origin)[3],
                     const int64_t (&length)[3], double* total);

// Rounds the totals to the result.
void store_bias(const Problem& problem, const Tensor& db, int64_t channel, int64_t channels, const double* total);

}  // namespace convgrad
