// The bias gradient: sums of dy per output channel.
#pragma once

#include <vector>

#include "conv.h"

namespace convgrad {

// Totals of some channels that grow by blocks: terms are added to a sum of at most 128 of them, these sums to one of at
// most 128, and that to the total. So no term passes through many roundings, whatever the data.
template <typename T>
class BlockedTotals {
 public:
  BlockedTotals(T* total, int64_t channels) : total_(total), now_(size_t(channels)), blocks_(size_t(channels)) {}
  ~BlockedTotals() {
    add(now_, blocks_.data());
    add(blocks_, total_);
  }
  BlockedTotals(const BlockedTotals&) = delete;

  // What to add to; so many terms were added to each channel's.
  T* now() { return now_.data(); }
  void added(int64_t terms) {
    if ((terms_ += terms) < longest) return;
    add(now_, blocks_.data());
    terms_ = 0;
    if (++folded_ < longest) return;
    add(blocks_, total_);
    folded_ = 0;
  }

 private:
  static constexpr int64_t longest = 128;
  static void add(std::vector<T>& from, T* to) {
    for (T& value : from) *to++ += value, value = 0;
  }
  T* total_;
  std::vector<T> now_, blocks_;
  int64_t terms_ = 0, folded_ = 0;
};
using BiasSums = BlockedTotals<double>;

// Adds the sums over the outputs [first, last) of each axis of one image for `channels` channels from dy's `channel` on.
// Lines are summed in f32, the lines' sums in double, in an order that the arguments fix.
struct BiasPart {
  int64_t image, channel, channels;
  int64_t first[3], last[3];
};
void add_bias(const Problem& problem, const Tensor& dy, const BiasPart& part, BiasSums& sums);

// The same for a box of outputs, `length` from `origin` on, of `images` images from `part.image` on.
void add_bias_of_box(const Problem& problem, const Tensor& dy, BiasPart part, int64_t images, const int64_t (&origin)[3],
                     const int64_t (&length)[3], double* total);

// Rounds the totals to the result.
void store_bias(const Problem& problem, const Tensor& db, int64_t channel, int64_t channels, const double* total);

}  // namespace convgrad
