// Few-channel weight gradients of bf16 by vdpbf16ps; see few_pairs.h.
#include "few_pairs.h"
#include "lane_weight_box.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

// --- packing ------------------------------------------------------------------------------------------------------

struct Finite {
  __m512i worst = _mm512_setzero_si512();
  CONVGRAD_INLINE __m512i exponents(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi16(0x7f80)); }
  __attribute__((always_inline)) void see(__m512i v) { worst = _mm512_max_epu16(worst, exponents(v)); }
  bool all() const { return !_mm512_cmpeq_epi16_mask(worst, _mm512_set1_epi16(0x7f80)); }
};

CONVGRAD_INLINE __m256i channels_of(const char* pixel, __mmask16 mask) {
  return _mm256_maskz_loadu_epi16(mask, pixel);
}

// Two pixels side by side, channel by channel.
CONVGRAD_INLINE __m512i pair_of(__m256i first, __m256i second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
}

// A row: lanes [8, 16) of `shared` rows have the channels of lanes [0, 8) one pixel later.
template <bool Shared>
void pack_dy_row(const char* row, int64_t step, int64_t width, __mmask16 mask, int64_t pairs, uint32_t* to,
                 Finite& finite) {
  const auto at = [&](int64_t p) __attribute__((always_inline)) {
    const __m256i here = p < width ? channels_of(row + p * step, mask) : _mm256_setzero_si256();
    if constexpr (!Shared) return here;
    const __m256i before = p > 0 && p <= width ? channels_of(row + (p - 1) * step, mask) : _mm256_setzero_si256();
    return _mm256_inserti128_si256(here, _mm256_castsi256_si128(before), 1);
  };
  for (int64_t i = 0; i < pairs; ++i, to += 16) {
    const __m512i pair = pair_of(at(2 * i), at(2 * i + 1));
    finite.see(pair);
    _mm512_storeu_si512(to, pair);
  }
}

// Elements `bytes` bytes apart: any distance, also none (a broadcast view), backwards or odd. Those up to 16 elements
// apart are taken out of two vectors, others one by one.
struct Gather {
  int64_t bytes, step = 0, most = 0;  // in elements, 0: one by one; at once
  __m512i order = _mm512_setzero_si512();
  explicit Gather(int64_t bytes) : bytes(bytes) {
    if (bytes < 2 || bytes > 32 || bytes % 2) return;
    step = bytes / 2;
    most = 63 / step + 1 > 32 ? 32 : 63 / step + 1;
    alignas(64) uint16_t places[32];
    for (int64_t i = 0; i < 32; ++i) places[i] = uint16_t(i * step);
    order = _mm512_load_si512(places);
  }
};

void gather_elements(const char* from, const Gather& gather, int64_t n, uint16_t* to, Finite& finite) {
  const int64_t step = gather.step, most = gather.most;
  if (step == 0) {
    for (int64_t i = 0; i < n; ++i) __builtin_memcpy(to + i, from + i * gather.bytes, 2);
    for (int64_t i = 0; i < n; i += 32) {
      const __mmask32 part = n - i < 32 ? (1u << (n - i)) - 1 : ~0u;
      finite.see(_mm512_maskz_loadu_epi16(part, to + i));
    }
    return;
  }
  for (int64_t i = 0; i < n; i += most) {
    const int64_t count = n - i < most ? n - i : most, span = (count - 1) * step + 1;
    const char* p = from + i * step * 2;
    const __mmask32 low = span < 32 ? (1u << span) - 1 : ~0u, kept = count < 32 ? (1u << count) - 1 : ~0u;
    const __mmask32 high = span <= 32 ? 0 : span < 64 ? (1u << (span - 32)) - 1 : ~0u;
    __m512i v = _mm512_maskz_loadu_epi16(low, p);
    if (step > 1) v = _mm512_permutex2var_epi16(v, gather.order, _mm512_maskz_loadu_epi16(high, p + 64));
    v = _mm512_maskz_mov_epi16(kept, v);
    finite.see(v);
    _mm512_mask_storeu_epi16(to + i, kept, v);
  }
}

// --- products -----------------------------------------------------------------------------------------------------

CONVGRAD_INLINE void add(__m512& sum, __m512i dy, __m512i x) { sum = _mm512_dpbf16_ps(sum, (__m512bh)dy, (__m512bh)x); }
#if defined(CONVGRAD_EMULATED_BF16)
CONVGRAD_INLINE void add_word(__m512& sum, __m512i dy, const char* word) {
  add(sum, dy, _mm512_set1_epi32(load<int32_t>(word)));
}
#else
// NOTE: GCC 12 would read the word into a register first, which was a fifth slower.
CONVGRAD_INLINE void add_word(__m512& sum, __m512i dy, const char* word) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(dy), "m"(*reinterpret_cast<const int32_t*>(word)));
}
#endif

using VisitTile = void (*)(const Visit&, const uint32_t*, const uint16_t*, float*);

// sums[k][r][s] += sum over the pairs of pixels of dy[k] * x[r][s].
template <int K, int R, int S>
void visit_tile(const Visit& v, const uint32_t* dy, const uint16_t* x, float* sums) {
  __m512 sum[K][R][S];
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) sum[k][r][s] = _mm512_setzero_ps();
  int64_t column[S];
  for (int s = 0; s < S; ++s) column[s] = 2 * v.x_column[s];
  const int64_t dy_channel = v.dy_channel, step = 2 * v.x_pixel;
  for (int64_t z = 0; z < v.planes; ++z)
    for (int64_t y = 0; y < v.rows; ++y) {
      const uint32_t* g = dy + z * v.dy_plane + y * v.dy_row;
      const char* p[R];
      for (int r = 0; r < R; ++r) p[r] = reinterpret_cast<const char*>(x + z * v.x_plane + y * v.x_row + v.x_line[r]);
      for (int64_t q = v.pixels; q > 0; --q, g += 16) {
        __m512i grad[K];
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) grad[k] = _mm512_loadu_si512(g + k * dy_channel);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
          for (int s = 0; s < S; ++s) {
            if constexpr (K == 1) {
              add_word(sum[0][r][s], grad[0], p[r] + column[s]);
            } else {
              const __m512i word = _mm512_set1_epi32(load<int32_t>(p[r] + column[s]));
#pragma GCC unroll 4
              for (int k = 0; k < K; ++k) add(sum[k][r][s], grad[k], word);
            }
          }
          p[r] += step;
        }
      }
    }
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        float* to = sums + k * v.sum_channel + v.sum_line[r] + s * v.sum_s;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum[k][r][s]));
      }
}

struct PairTiles {
  using X = uint16_t;
  using Dy = uint32_t;
  using Sum = float;
  static constexpr int most_sums = 25, most_parts = 4, most_lines = tallest_r;
  static constexpr double latency = 7;
  static constexpr int64_t roundings = 2;

  template <int K>
  struct Table {
    VisitTile of[tallest_r][widest_s];
    template <int I>
    static constexpr VisitTile made() {
      constexpr int R = I / widest_s + 1, S = I % widest_s + 1;
      if constexpr (K * R * S <= most_sums) return visit_tile<K, R, S>;
      else return nullptr;
    }
    template <int... I>
    constexpr explicit Table(std::integer_sequence<int, I...>) : of{} {
      ((of[I / widest_s][I % widest_s] = made<I>()), ...);
    }
  };
  template <int K>
  static constexpr Table<K> tiles{std::make_integer_sequence<int, tallest_r * widest_s>()};

  static VisitTile tile(const LaneWeightGrad&, int k, int r, int s) {
    return k == 4   ? tiles<4>.of[r - 1][s - 1]
           : k == 3 ? tiles<3>.of[r - 1][s - 1]
           : k == 2 ? tiles<2>.of[r - 1][s - 1]
                    : tiles<1>.of[r - 1][s - 1];
  }
};

}  // namespace

bool pack_dy_pairs(const PairRows& rows, int64_t channels, bool shared, int64_t pairs, uint32_t* to) {
  Finite finite;
  const PixelBox& box = *rows.box;
  const __mmask16 mask = channels < 16 ? __mmask16((1u << channels) - 1) : __mmask16(0xffff);
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y, to += pairs * 16) {
      const char* row = rows.data + (box.first[0] + z) * rows.stride[axis_d] +
                        (box.first[1] + y) * rows.stride[axis_h] + box.first[2] * rows.stride[axis_w];
      if (shared) pack_dy_row<true>(row, rows.stride[axis_w], box.extent[2], mask, pairs, to, finite);
      else pack_dy_row<false>(row, rows.stride[axis_w], box.extent[2], mask, pairs, to, finite);
    }
  return finite.all();
}

bool pair_lanes(const float* lanes, int64_t rows, int64_t width, bool shared, int64_t pairs, uint32_t* to) {
  Finite finite;
  for (int64_t row = 0; row < rows; ++row, lanes += width * 16) {
    // The values are bf16: their bits are the upper halves of the floats.
    const auto at = [&](int64_t p) {
      const __m512i here = p < width ? _mm512_loadu_si512(lanes + p * 16) : _mm512_setzero_si512();
      if (!shared) return here;
      const __m512i before = p > 0 && p <= width ? _mm512_loadu_si512(lanes + (p - 1) * 16) : _mm512_setzero_si512();
      return _mm512_shuffle_i64x2(here, before, 0x44);
    };
    for (int64_t i = 0; i < pairs; ++i, to += 16) {
      const __m512i pair = _mm512_or_si512(_mm512_srli_epi32(at(2 * i), 16),
                                           _mm512_and_si512(at(2 * i + 1), _mm512_set1_epi32(int(0xffff0000u))));
      finite.see(pair);
      _mm512_storeu_si512(to, pair);
    }
  }
  return finite.all();
}

bool pack_x_places(const PairRows& rows, int64_t stride, int64_t places, uint16_t* to) {
  Finite finite;
  const PixelBox& box = *rows.box;
  const Gather gather(rows.stride[axis_w] * stride);
  const int64_t step = rows.stride[axis_w], width = box.extent[2], left = box.first[2] < 0 ? -box.first[2] : 0;
  const int64_t end = rows.size[2] - box.first[2] < width ? rows.size[2] - box.first[2] : width;  // of what is inside
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y) {
      const char* row = rows.data + (box.first[0] + z) * rows.stride[axis_d] +
                        (box.first[1] + y) * rows.stride[axis_h] + box.first[2] * step;
      for (int64_t residue = 0; residue < stride; ++residue, to += places) {
        int64_t low = left > residue ? (left - residue + stride - 1) / stride : 0;
        int64_t high = end > residue ? (end - residue - 1) / stride + 1 : 0;
        if (low > places) low = places;
        if (high > places) high = places;
        if (high < low) high = low;
        __builtin_memset(to, 0, size_t(low) * 2);
        gather_elements(row + (residue + low * stride) * step, gather, high - low, to + low, finite);
        __builtin_memset(to + high, 0, size_t(places - high) * 2);
      }
    }
  return finite.all();
}

bool pack_x_words(const PairRows& rows, int64_t channels, int64_t stride, int64_t pixels, uint32_t* to) {
  Finite finite;
  const PixelBox& box = *rows.box;
  const int64_t step = rows.stride[axis_w], left = box.first[2] < 0 ? -box.first[2] : 0;
  const int64_t room = rows.size[2] - box.first[2], end = room < box.extent[2] ? room : box.extent[2];
  const bool whole = step == channels * 2;  // the pixels of a row follow each other
  const int64_t low = left * channels, high = end * channels;  // inside the tensor
  const auto first_of = [](int64_t n) { return n < 0 ? 0u : n < 16 ? (1u << n) - 1 : 0xffffu; };
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y, to += pixels * channels) {
      const char* row = rows.data + (box.first[0] + z) * rows.stride[axis_d] +
                        (box.first[1] + y) * rows.stride[axis_h] + box.first[2] * step;
      const auto put = [&](int64_t at, __m256i first, __m256i second) __attribute__((always_inline)) {
        const __m512i words = pair_of(first, second);
        finite.see(words);
        _mm512_storeu_si512(to + at, words);
      };
      if (whole) {
        const auto take = [&](int64_t at) __attribute__((always_inline)) {
          return channels_of(row + at * 2, __mmask16(first_of(high - at) & ~first_of(low - at)));
        };
        for (int64_t at = 0; at < pixels * channels; at += 16) put(at, take(at), take(at + stride * channels));
        continue;
      }
      for (int64_t i = 0; i < pixels; ++i) {
        const bool one = i >= left && i < end, two = i + stride >= left && i + stride < end;
        const char* p = row + i * step;
        for (int64_t c = 0; c < channels; c += 16) {
          const __mmask16 mask = __mmask16(first_of(channels - c));
          put(i * channels + c, channels_of(p + c * 2, one ? mask : __mmask16(0)),
              channels_of(p + stride * step + c * 2, two ? mask : __mmask16(0)));
        }
      }
    }
  return finite.all();
}

void weight_grad_pairs(const LaneWeightGrad& job) { BoxJob<PairTiles>(job).run(); }

}  // namespace convgrad::CONVGRAD_ISA
