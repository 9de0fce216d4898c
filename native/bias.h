// The bias gradient: sums of dy per output channel.
#pragma once

#include "conv.h"

namespace convgrad {

// Adds the sums over output rows [first_row, last_row) of one image (rows of W, numbered over D and H), columns
// [first_column, last_column), to total[k] for `channels` channels from dy's `channel` on. Lines are summed in f32,
// the lines' sums in double, in an order that the arguments fix.
struct BiasPart {
  int64_t image, channel, channels;
  int64_t first[3], last[3];
};
void add_bias(const Problem& problem, const Tensor& dy, const BiasPart& part, double* total);

// Rounds the totals to the result.
void store_bias(const Problem& problem, const Tensor& db, int64_t channel, int64_t channels, const double* total);

}  // namespace convgrad
