// Bringing the next tile's part of a tensor towards the cache while the current tile is being multiplied.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "conv.h"

namespace convgrad {

// A box of one image of an activation tensor: channels and a range of coordinates per axis.
struct Region {
  const char* data;  // of the image and the first channel
  int64_t channel_stride, stride[3];
  int64_t channels, first[3], last[3], element;
};

// Results of so many bytes are not in a cache when they are read again: whole lines of them are written around it.
inline bool writes_around_caches(int64_t bytes) { return bytes > (8 << 20); }

// Bring the cache line at `p` in, to be read or written. NOTE: the compiler drops calls of functions that do nothing but
// __builtin_prefetch; it keeps these.
#if defined(__x86_64__)
inline void fetch_to_read(const char* p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }
inline void fetch_to_write(const char* p) { asm volatile("prefetchw %0" : : "m"(*p)); }
inline void finish_streams() { asm volatile("sfence" : : : "memory"); }  // others see what was written around caches
// Both at a multiple of 16 bytes, `line` of 64.
inline void write_line_around(char* line, const void* from) {
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128(reinterpret_cast<__m128i*>(line) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
}
#else
inline void fetch_to_read(const char* p) { __builtin_prefetch(p); }
inline void fetch_to_write(const char* p) { __builtin_prefetch(p, 1); }
inline void finish_streams() {}
inline void write_line_around(char* line, const void* from) { std::memcpy(line, from, 64); }
#endif

// The cache lines of rows of bytes, at most so many, as a kernel's call takes them: to be written.
inline int64_t lines_to_write(const char* row, int64_t rows, int64_t stride, int64_t bytes, const char** lines,
                              int64_t most) {
  int64_t n = 0;
  if ((reinterpret_cast<uintptr_t>(row) | uintptr_t(stride)) % 64 == 0 && bytes <= 64) {
    for (; n < std::min(rows, most); ++n) lines[n] = row + n * stride + 1;
    return n;
  }
  for (int64_t i = 0; i < rows; ++i, row += stride)
    for (const char* at = row - reinterpret_cast<uintptr_t>(row) % 64; at < row + bytes && n < most; at += 64)
      lines[n++] = at + 1;
  return n;
}

// A queue of runs of memory, of which every call of a kernel takes a few cache lines to fetch between its products.
class Prefetch {
 public:
  void clear() {
    runs_.clear();
    run_ = 0;
    at_ = 0;
    lines_ = 0;
  }
  void add(const Region& r);
  // Spreads what was added over this many calls of `take`.
  void spread(int64_t calls) { per_call_ = lines_ / std::max<int64_t>(calls, 1) + 1; }
  static constexpr int64_t most_taken = 512;
  int64_t take(const char** lines) {
    const int64_t wanted = std::min(per_call_, most_taken);
    int64_t n = 0;
    while (n < wanted && run_ < runs_.size()) {
      const Run& run = runs_[run_];
      for (; n < wanted && at_ < run.bytes; at_ += 64) lines[n++] = run.data + at_;
      if (at_ >= run.bytes) {
        at_ = 0;
        ++run_;
      }
    }
    return n;
  }

 private:
  struct Run {
    const char* data;  // of a whole cache line
    int64_t bytes;
  };
  std::vector<Run> runs_;
  size_t run_ = 0;
  int64_t at_ = 0, lines_ = 0, per_call_ = 0;
};

}  // namespace convgrad
