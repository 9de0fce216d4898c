// Bringing the next tile's part of a tensor towards the cache while the current tile is being multiplied.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "conv.h"

namespace convgrad {

// A box of one image of an activation tensor: channels and a range of coordinates per axis.
struct Region {
  const char* data;  // of the image and the first channel
  int64_t channel_stride, stride[3];
  int64_t channels, first[3], last[3], element;
};

// Bring the cache line at `p` in, to be read or written. NOTE: the compiler drops calls of functions that do nothing but
// __builtin_prefetch; it keeps these.
#if defined(__x86_64__)
inline void fetch_to_read(const char* p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }
inline void fetch_to_write(const char* p) { asm volatile("prefetchw %0" : : "m"(*p)); }
#else
inline void fetch_to_read(const char* p) { __builtin_prefetch(p); }
inline void fetch_to_write(const char* p) { __builtin_prefetch(p, 1); }
#endif

// A queue of runs of memory; every call of `some` fetches a few cache lines of them.
class Prefetch {
 public:
  void clear() {
    runs_.clear();
    run_ = 0;
    at_ = 0;
    lines_ = 0;
  }
  void add(const Region& r);
  // Spreads what was added over this many calls of `some`.
  void spread(int64_t calls) { per_call_ = lines_ / std::max<int64_t>(calls, 1) + 1; }
  // The addresses that `some` would fetch, for a kernel that does it between its products.
  static constexpr int64_t most_taken = 512;
  int64_t take(const char** lines) {
    int64_t n = 0;
    for (; n < std::min(per_call_, most_taken) && run_ < runs_.size(); ++n) {
      const char* line = next();
      lines[n] = line - reinterpret_cast<uintptr_t>(line) % 64;
    }
    return n;
  }
  void some() {
    for (int64_t n = 0; n < per_call_ && run_ < runs_.size(); ++n) __builtin_prefetch(next(), 0, 2);
  }

 private:
  const char* next() {
    const char* line = runs_[run_].data + at_;
    at_ += 64;
    if (at_ >= runs_[run_].bytes) {
      at_ = 0;
      ++run_;
    }
    return line;
  }
  struct Run {
    const char* data;
    int64_t bytes;
  };
  std::vector<Run> runs_;
  size_t run_ = 0;
  int64_t at_ = 0, lines_ = 0, per_call_ = 0;
};

}  // namespace convgrad
