// Output and input gradient of grouped convolutions where the tensors lie, channels last; see direct.h. AVX-512.
//
// A vector holds the sums of 16 result channels, of one group or of several. A source word (an f32, or two bf16
// channels) is spread over the lanes of its group and meets the weights of all of them.
#include <utility>

#include "blocked_sums.h"
#include "direct_rows.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool words_are_pairs = true;
using Element = AsBf16;
CONVGRAD_INLINE void add(VecF& sum, VecF weight, VecF words) {
  sum = (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)weight, (__m512bh)(__m512)words);
}
#if defined(CONVGRAD_EMULATED_BF16)
CONVGRAD_INLINE void add_word(VecF& sum, VecF weight, const char* word) {
  add(sum, weight, (VecF)_mm512_set1_epi32(load<int32_t>(word)));
}
#else
// NOTE: GCC 12 would read the word into a register first, which was a fifth slower.
CONVGRAD_INLINE void add_word(VecF& sum, VecF weight, const char* word) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(*reinterpret_cast<const int32_t*>(word)));
}
#endif
#else
constexpr bool words_are_pairs = false;
using Element = AsF32;
CONVGRAD_INLINE void add(VecF& sum, VecF weight, VecF words) { sum += weight * words; }
CONVGRAD_INLINE void add_word(VecF& sum, VecF weight, const char* word) { sum += weight * load<float>(word); }
#endif

// Which of the P + S - 1 pixels that S neighbouring taps of P pixels read lie in the tensor: [low, high).
struct Inside {
  int64_t low, high;
};

// One group fills the vector: a word is read into all lanes. S neighbouring taps of P pixels, all words of the group.
template <int Q>
struct OneGroup {
  static constexpr int words = Q;
  template <int P, int S>
  CONVGRAD_INLINE void slide(VecF* sum, const Sweep& sweep, const char* from, const float* w, Inside in) {
    for (int64_t chunk = 0; chunk < sweep.chunks; ++chunk, w += Q * lanes_f, from += Q * 4) {
      VecF weight[S][Q];
#pragma GCC unroll 8
      for (int s = 0; s < S; ++s)
#pragma GCC unroll 8
        for (int i = 0; i < Q; ++i) weight[s][i] = load<VecF>(w + s * sweep.w_s + i * lanes_f);
      // Word by word: the products of one follow each other in sums that are ready.
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) {
        const char* p = from + i * 4;
#pragma GCC unroll 32
        for (int x = 0; x < P + S - 1; ++x, p += sweep.from_pixel) {
          in_register(p);
          if ((x < S - 1 && x < in.low) || (x >= P && x >= in.high)) continue;
          VecF word = (VecF)_mm512_set1_ps(load<float>(p));
          in_register(word);
#pragma GCC unroll 8
          for (int s = 0; s < S; ++s)
            if (x - s >= 0 && x - s < P) add(sum[x - s], weight[s][i], word);
        }
      }
    }
  }
  template <int P>
  CONVGRAD_INLINE void one_tap(VecF* sum, const Sweep& sweep, const char* from, const float* w, uint64_t at) {
    for (int64_t chunk = 0; chunk < sweep.chunks; ++chunk, w += Q * lanes_f, from += Q * 4) {
      VecF weight[Q];
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) weight[i] = load<VecF>(w + i * lanes_f);
      const char* p = from;
      uint64_t here = at;
#pragma GCC unroll 32
      for (int x = 0; x < P; ++x, p += sweep.from_pixel, here += uint64_t(sweep.step)) {
        in_register(p);
        if (here >= sweep.size) continue;
#pragma GCC unroll 8
        for (int i = 0; i < Q; ++i) add_word(sum[x], weight[i], p + i * 4);
      }
    }
  }
};

// Several groups share it: their words are read together and moved to the lanes of each.
template <int Q>
struct SomeGroups {
  static constexpr int words = Q;
  template <int P, int S>
  CONVGRAD_INLINE void slide(VecF* sum, const Sweep& sweep, const char* from, const float* w, Inside in) {
    for (int64_t chunk = 0; chunk < sweep.chunks; ++chunk, w += Q * lanes_f) {
      VecF weight[S][Q];
#pragma GCC unroll 8
      for (int s = 0; s < S; ++s)
#pragma GCC unroll 8
        for (int i = 0; i < Q; ++i) weight[s][i] = load<VecF>(w + s * sweep.w_s + i * lanes_f);
      __m512i order[Q];
      for (int i = 0; i < Q; ++i)
        order[i] = _mm512_add_epi32(_mm512_loadu_si512(sweep.first_word), _mm512_set1_epi32(int(chunk) * Q + i));
      const char* p = from;
#pragma GCC unroll 32
      for (int x = 0; x < P + S - 1; ++x, p += sweep.from_pixel) {
        in_register(p);
        if (x < in.low || x >= in.high) continue;
        const __m512 all = words_are_pairs
                               ? _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(p)))
                               : _mm512_loadu_ps(p);
#pragma GCC unroll 8
        for (int i = 0; i < Q; ++i) {
          VecF word = (VecF)_mm512_permutexvar_ps(order[i], all);
          if (S > 1) in_register(word);
#pragma GCC unroll 8
          for (int s = 0; s < S; ++s)
            if (x - s >= 0 && x - s < P) add(sum[x - s], weight[s][i], word);
        }
      }
    }
  }
  template <int P>
  CONVGRAD_INLINE void one_tap(VecF* sum, const Sweep& sweep, const char* from, const float* w, uint64_t at) {
    const int64_t first = int64_t(at), size = int64_t(sweep.size), step = sweep.step;
    const int64_t low = first < 0 ? (step - 1 - first) / step : 0;
    slide<P, 1>(sum, sweep, from, w, {low, first < size ? (size - 1 - first) / step + 1 : 0});
  }
};

// S neighbouring taps of P pixels; where more than their margins lie beside the tensor, one after the other.
template <typename G, int P, int S>
CONVGRAD_INLINE void slide(VecF* sum, const Sweep& sweep, const char* from, const float* w, uint64_t at) {
  const int64_t first = int64_t(at);
  const Inside in{-first, int64_t(sweep.size) - first};
  if (in.low <= S - 1 && in.high >= P) return G::template slide<P, S>(sum, sweep, from, w, in);
  for (int64_t s = 0; s < S; ++s)
    G::template one_tap<P>(sum, sweep, from + s * sweep.from_pixel, w + s * sweep.w_s, at + uint64_t(s));
}

template <int P>
CONVGRAD_INLINE void finish_tile(Sweep& sweep, const char* from, char* to, const VecF* sum) {
  if (sweep.lines) {
    if (words_are_pairs)  // half lines are not written around the caches: those of the next row are fetched
      for (int p = 0; p < P; ++p) __builtin_prefetch(to + p * sweep.to_pixel + sweep.to_row, 1, 3);
    for (int64_t i = 0; i < sweep.lines; ++i) __builtin_prefetch(sweep.next + i * 64, 0, 2);
    sweep.next += sweep.lines * 64;
  } else {
    for (int p = 0; p < P; ++p) __builtin_prefetch(from + sweep.ahead + p * sweep.from_pixel);
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) put<Element>(to + p * sweep.to_pixel, sum[p], !words_are_pairs && sweep.stream);
}

// Taps that read neighbouring pixels go three or two at a time, others one by one.
template <typename G, int P, bool Slide>
void group_tile(Sweep& sweep, const char* from, const float* w, char* to) {
  VecF sum[P] = {};
  BlockedSums<VecF, P> blocks;
  const int64_t tap = sweep.chunks * G::words * (words_are_pairs ? 2 : 1);  // roundings of a tap
  for (int64_t t = 0; t < sweep.t; ++t)
    for (int64_t r = 0; r < sweep.r; ++r) {
      const char* f = from + t * sweep.from_t + r * sweep.from_r;
      const float* v = w + t * sweep.w_t + r * sweep.w_r;
      uint64_t at = sweep.low;
      int64_t left = sweep.s;
      if constexpr (Slide) {
        for (; left == 3 || left > 4; left -= 3, f += 3 * sweep.from_s, v += 3 * sweep.w_s, at += 3) {
          blocks.expect(sum, 3 * tap);
          slide<G, P, 3>(sum, sweep, f, v, at);
        }
        for (; left > 0; left -= 2, f += 2 * sweep.from_s, v += 2 * sweep.w_s, at += 2) {
          blocks.expect(sum, 2 * tap);
          slide<G, P, 2>(sum, sweep, f, v, at);
        }
      } else {
        for (; left > 0; --left, f += sweep.from_s, v += sweep.w_s, at += uint64_t(sweep.tap_step)) {
          blocks.expect(sum, tap);
          G::template one_tap<P>(sum, sweep, f, v, at);
        }
      }
    }
  blocks.finish(sum);
  finish_tile<P>(sweep, from, to, sum);
}

constexpr int group_widths[] = {16, 14, 12, 10, 8, 7, 6, 4, 2, 1}, shared_widths[] = {10, 8, 7, 6, 4, 2, 1};

template <typename G, bool Slide, const auto& all, int... I>
constexpr auto tile_table(std::integer_sequence<int, I...>) {
  struct { Tile of[sizeof...(I)]; } table = {{group_tile<G, all[I], Slide>...}};
  return table;
}

template <typename G, const auto& all>
struct GroupTiles {
  static constexpr int vectors = 1, width_count = int(std::size(all));
  static constexpr const auto& widths = all;
  static constexpr auto slides = tile_table<G, true, all>(std::make_integer_sequence<int, width_count>());
  static constexpr auto sweeps = tile_table<G, false, all>(std::make_integer_sequence<int, width_count>());
  static const Tile* sliding(int64_t, int64_t) { return slides.of; }
  static const Tile* sweeping(int64_t) { return sweeps.of; }
  static void prepare(const DirectUnits& units, Sweep& sweep) {
    const int64_t words = words_are_pairs ? units.group_from / 2 : units.group_from;
    sweep.chunks = words / G::words;
    for (int lane = 0; lane < lanes_f; ++lane)
      sweep.first_word[lane] = units.group_to < lanes_f ? int32_t(lane / units.group_to * words) : 0;
  }
};

}  // namespace

void correlate_groups(const DirectRows& job) {
  const DirectUnits& units = job.units;
  const int64_t words = words_are_pairs ? units.group_from / 2 : units.group_from;
  if (units.group_to >= lanes_f) {
    if (words % 4 == 0) return RowsJob<GroupTiles<OneGroup<4>, group_widths>>(job).run();
    if (words % 2 == 0) return RowsJob<GroupTiles<OneGroup<2>, group_widths>>(job).run();
    return RowsJob<GroupTiles<OneGroup<1>, group_widths>>(job).run();
  }
  if (words % 4 == 0) return RowsJob<GroupTiles<SomeGroups<4>, shared_widths>>(job).run();
  RowsJob<GroupTiles<SomeGroups<2>, shared_widths>>(job).run();
}

}  // namespace convgrad::CONVGRAD_ISA
