// Output and input gradient of grouped convolutions where the tensors lie, channels last; see direct.h. AVX-512.
//
// A vector holds the sums of 16 result channels, of one group or of several. A source word (an f32, or two bf16
// channels) is spread over the lanes of its group and meets the weights of all of them.
#include <utility>

#include "direct_rows.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

#if defined(__AVX512BF16__)
constexpr bool words_are_pairs = true;
using Element = AsBf16;
CONVGRAD_INLINE void add(VecF& sum, VecF weight, VecF words) {
  sum = (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)weight, (__m512bh)(__m512)words);
}
#else
constexpr bool words_are_pairs = false;
using Element = AsF32;
CONVGRAD_INLINE void add(VecF& sum, VecF weight, VecF words) { sum += weight * words; }
#endif

// One group fills the vector: a word is read into all lanes.
template <int Q>
struct OneGroup {
  static constexpr int words = Q;
  const char* p;
  CONVGRAD_INLINE OneGroup start(const Sweep&, int64_t) { return {nullptr}; }
  __attribute__((always_inline)) void read(const char* pixel, int64_t chunk) { p = pixel + chunk * Q * 4; }
  __attribute__((always_inline)) VecF take(int i) const { return (VecF)_mm512_set1_ps(load<float>(p + i * 4)); }
};

// Several groups share it: their words are read together and moved to the lanes of each.
template <int Q>
struct SomeGroups {
  static constexpr int words = Q;
  __m512i order[Q];
  __m512 all;
  CONVGRAD_INLINE SomeGroups start(const Sweep& sweep, int64_t chunk) {
    SomeGroups g;
    for (int i = 0; i < Q; ++i)
      g.order[i] = _mm512_add_epi32(_mm512_loadu_si512(sweep.first_word), _mm512_set1_epi32(int(chunk) * Q + i));
    g.all = _mm512_setzero_ps();
    return g;
  }
  __attribute__((always_inline)) void read(const char* pixel, int64_t) {
    all = words_are_pairs ? _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(pixel)))
                          : _mm512_loadu_ps(pixel);
  }
  __attribute__((always_inline)) VecF take(int i) const { return (VecF)_mm512_permutexvar_ps(order[i], all); }
};

// S neighbouring taps of P pixels, all words of the group.
template <typename G, int P, int S>
CONVGRAD_INLINE void slide(VecF* sum, const Sweep& sweep, const char* from, const float* w, uint64_t at) {
  constexpr int Q = G::words;
  const int64_t step = sweep.from_pixel, pixel_step = sweep.step;
  for (int64_t chunk = 0; chunk < sweep.chunks; ++chunk, w += Q * lanes_f) {
    VecF weight[S][Q];
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) weight[s][i] = load<VecF>(w + s * sweep.w_s + i * lanes_f);
    G source = G::start(sweep, chunk);
    const char* p = from;
    uint64_t here = at;
#pragma GCC unroll 32
    for (int x = 0; x < P + S - 1; ++x, p += step, here += uint64_t(pixel_step)) {
      in_register(p);
      if (here >= sweep.size) continue;
      source.read(p, chunk);
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) {
        VecF word = source.take(i);
        if (S > 1) in_register(word);
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s)
          if (x - s >= 0 && x - s < P) add(sum[x - s], weight[s][i], word);
      }
    }
  }
}

template <int P>
CONVGRAD_INLINE void finish_tile(Sweep& sweep, const char* from, char* to, const VecF* sum) {
  for (int p = 0; p < P; ++p) __builtin_prefetch(from + sweep.ahead + p * sweep.from_pixel);
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) put<Element>(to + p * sweep.to_pixel, sum[p], !words_are_pairs && sweep.stream);
}

// Taps that read neighbouring pixels go three at a time, others one by one.
template <typename G, int P, bool Slide>
void group_tile(Sweep& sweep, const char* from, const float* w, char* to) {
  VecF sum[P] = {};
  for (int64_t t = 0; t < sweep.t; ++t)
    for (int64_t r = 0; r < sweep.r; ++r) {
      const char* f = from + t * sweep.from_t + r * sweep.from_r;
      const float* v = w + t * sweep.w_t + r * sweep.w_r;
      uint64_t at = sweep.low;
      int64_t left = sweep.s;
      if constexpr (Slide)
        for (; left >= 3; left -= 3, f += 3 * sweep.from_s, v += 3 * sweep.w_s, at += 3)
          slide<G, P, 3>(sum, sweep, f, v, at);
      for (; left > 0; --left, f += sweep.from_s, v += sweep.w_s, at += uint64_t(sweep.tap_step))
        slide<G, P, 1>(sum, sweep, f, v, at);
    }
  finish_tile<P>(sweep, from, to, sum);
}

constexpr int group_widths[] = {14, 12, 10, 8, 7, 6, 4, 2, 1}, shared_widths[] = {10, 8, 7, 6, 4, 2, 1};

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
  static const Tile* sliding(int64_t) { return slides.of; }
  static const Tile* sweeping() { return sweeps.of; }
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
  if (units.group_to >= lanes_f) return RowsJob<GroupTiles<OneGroup<4>, group_widths>>(job).run();
  if (words % 4 == 0) return RowsJob<GroupTiles<SomeGroups<4>, shared_widths>>(job).run();
  RowsJob<GroupTiles<SomeGroups<2>, shared_widths>>(job).run();
}

}  // namespace convgrad::CONVGRAD_ISA
