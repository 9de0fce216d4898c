// Sums in registers that are cut into blocks: no term passes through many roundings, whatever the data
// (docs/contract.md). What a block has summed waits in memory beside the registers.
#pragma once

#include "simd.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {
namespace {

constexpr int64_t longest_chain = 256;  // roundings of a block
constexpr int64_t longest_whole = 512;  // of sums that are not cut: tiles of their own, which are faster

template <typename V, int N>
class BlockedSums {
 public:
  // Call it before each of the N sums takes so many more products, at most `longest_chain`.
  __attribute__((always_inline)) void expect(V* sum, int64_t products) {
    roundings_ += products;
    if (__builtin_expect(roundings_ <= longest_chain, 1)) return;
#pragma GCC unroll 64
    for (int i = 0; i < N; ++i) {
      waiting_[i] = any_ ? waiting_[i] + sum[i] : sum[i];
      sum[i] = V{};
    }
    any_ = true;
    roundings_ = products;
  }
  __attribute__((always_inline)) void finish(V* sum) const {
    if (__builtin_expect(!any_, 1)) return;
#pragma GCC unroll 64
    for (int i = 0; i < N; ++i) sum[i] += waiting_[i];
  }

 private:
  V waiting_[N];
  int64_t roundings_ = 0;
  bool any_ = false;
};

}  // namespace
}  // namespace convgrad::CONVGRAD_ISA
#endif
