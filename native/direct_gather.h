// Copies of the pixels that a group reads, side by side; see direct.h. AVX-512.
//
// NOTE: pixels with channels last are often a multiple of 1024 bytes apart. Then they share four sets of the
// first-level cache or fewer, and every read of a tile misses it (n8 c512 i14x14 w3x3 g32 f32 on Zen 4: 61 -> 83
// GFLOP/s). A pixel that meets many weights is copied once instead, while the next group's is fetched.
#pragma once

#include <immintrin.h>

#include "direct.h"
#include "lane_elements.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {
namespace {

// A box of pixels, all inside the tensor; `from` is its first one.
struct Gather {
  const char* from;
  const int64_t* stride;  // bytes, canonical axes
  int64_t extent[3];
  int64_t bytes;          // of a pixel
};

// Pixel after pixel, densely.
CONVGRAD_INLINE void gather_bytes(const Gather& box, char* to) {
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y) {
      const char* from = box.from + z * box.stride[axis_d] + y * box.stride[axis_h];
      for (int64_t x = 0; x < box.extent[2]; ++x, from += box.stride[axis_w], to += box.bytes) {
        int64_t i = 0;
        for (; i + 64 <= box.bytes; i += 64) {
          _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
        }
        if (i == box.bytes) continue;
        const __mmask64 rest = ~__mmask64(0) >> (64 - (box.bytes - i));
        _mm512_mask_storeu_epi8(to + i, rest, _mm512_maskz_loadu_epi8(rest, from + i));
      }
    }
}

#if defined(__AVX512BF16__)
// Words of two bf16, a channel of a pixel and of the one `step` pixels after it (zero beside the tensor, which has
// `left` pixels from the first one of a row on). A pixel has whole vectors of words.
CONVGRAD_INLINE void gather_pairs(const Gather& box, int64_t step, int64_t left, char* to) {
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y) {
      const char* from = box.from + z * box.stride[axis_d] + y * box.stride[axis_h];
      for (int64_t x = 0; x < box.extent[2]; ++x, from += box.stride[axis_w])
        for (int64_t i = 0; i < box.bytes; i += 32, to += 64) {
          const __mmask16 some = box.bytes - i >= 32 ? 0xffff : __mmask16((1 << (box.bytes - i) / 2) - 1);
          const __mmask16 both = x + step < left ? some : 0;
          const __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, from + i));
          const __m256i second = _mm256_maskz_loadu_epi16(both, from + i + step * box.stride[axis_w]);
          _mm512_storeu_si512(to, _mm512_or_si512(first, _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16)));
        }
    }
}
#endif

// The lines of boxes that will be gathered next, fetched a few at a time while something is computed: all at once they
// would wait for each other.
struct Fetcher {
  Gather box[2];
  int64_t boxes = 0, now = 0, z = 0, y = 0, x = 0;
  const char* pixel = nullptr;

  [[gnu::always_inline]] void add(Gather next, int64_t ahead) {
    next.from += ahead;
    if (!boxes) pixel = next.from;
    box[boxes++] = next;
  }
  [[gnu::always_inline]] void fetch(int64_t pixels) {
    for (; pixels > 0 && now < boxes; --pixels) {
      const Gather& b = box[now];
      for (int64_t i = 0; i < b.bytes; i += 64) __builtin_prefetch(pixel + i, 0, 2);
      pixel += b.stride[axis_w];
      if (++x < b.extent[2]) continue;
      x = 0;
      if (++y == b.extent[1]) y = 0, ++z;
      if (z == b.extent[0]) z = 0, ++now;
      if (now < boxes) pixel = box[now].from + z * box[now].stride[axis_d] + y * box[now].stride[axis_h];
    }
  }
};

}  // namespace
}  // namespace convgrad::CONVGRAD_ISA
#endif
