// Output and input gradient of depthwise convolutions where the tensors lie, channels last; see direct.h.
#include <utility>

#include "blocked_sums.h"
#include "direct_rows.h"
#include "direct_units.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

// Pixels of a tile: their sums are what the register file holds beside one run of weights.
#if CONVGRAD_VECTOR_BYTES == 64
constexpr int widths_one[] = {14, 11, 8, 7, 6, 4, 2, 1}, widths_two[] = {7, 6, 5, 4, 3, 2, 1};
#else
constexpr int widths_one[] = {8, 7, 6, 5, 4, 2, 1}, widths_two[] = {4, 3, 2, 1};
#endif
constexpr int long_slide = 5;  // taps at a time of a long row

template <typename U> constexpr const auto& widths = [] () -> const auto& {
  if constexpr (U::vectors == 1) return widths_one;
  else return widths_two;
}();

template <typename U, int P>
CONVGRAD_INLINE void finish_tile(Sweep& sweep, const char* from, char* to, VecF (*sum)[U::vectors]) {
  if (sweep.lines) {
    for (int64_t i = 0; i < sweep.lines; ++i, sweep.next += 64) __builtin_prefetch(sweep.next, 0, 2);
  } else {
    for (int p = 0; p < P; ++p) __builtin_prefetch(from + sweep.ahead + p * sweep.from_pixel, 0, 2);
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) U::store(to + p * sweep.to_pixel, sum[p], sweep.stream);
}

// Calls body.template operator()<Both>(t, r) for every row of taps, or every pair of rows.
template <typename U, typename Body>
CONVGRAD_INLINE void each_row(const Sweep& sweep, const Body& body) {
  for (int64_t t = 0; t < sweep.t; ++t) {
    int64_t r = 0;
    for (; r + U::rows <= sweep.r; r += U::rows) body.template operator()<true>(t, r);
    if (r < sweep.r) body.template operator()<false>(t, r);
  }
}

// P result pixels; every tap reads its own source pixels. Blocked: there are many taps, see blocked_sums.h.
template <typename U, int P, bool Blocked>
void sweep_tile(Sweep& sweep, const char* from, const float* w, char* to) {
  constexpr int K = U::vectors;
  VecF sum[P][K] = {};
  BlockedSums<VecF, P * K> blocks;
  each_row<U>(sweep, [&]<bool Both>(int64_t t, int64_t r) __attribute__((always_inline)) {
    const char* f = from + t * sweep.from_t + r * sweep.from_r;
    const float* v = w + t * sweep.w_t + r * sweep.w_r;
    uint64_t at = sweep.low;
    for (int64_t s = 0; s < sweep.s; ++s, f += sweep.from_s, v += sweep.w_s, at += uint64_t(sweep.tap_step)) {
      if constexpr (Blocked) blocks.expect(sum[0], U::rows);
      VecF weight[K];
      for (int k = 0; k < K; ++k) weight[k] = U::template weight<Both>(v + k * lanes_f);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
        if (at + uint64_t(p * sweep.step) >= sweep.size) continue;
        VecF pixel[K];
        U::template load_rows<Both>(f + p * sweep.from_pixel, sweep.from_r, pixel);
        for (int k = 0; k < K; ++k) U::add(sum[p][k], weight[k], pixel[k]);
      }
    }
  });
  if constexpr (Blocked) blocks.finish(sum[0]);
  finish_tile<U, P>(sweep, from, to, sum);
}

// S taps of P pixels where neighbouring taps read neighbouring pixels: each pixel is read once.
template <typename U, int P, int S, bool Both>
CONVGRAD_INLINE void slide(VecF (*sum)[U::vectors], const Sweep& sweep, const char* from, const float* w, uint64_t at) {
  constexpr int K = U::vectors;
  const int64_t step = sweep.from_pixel, w_tap = sweep.w_s, row = sweep.from_r;
  const uint64_t size = sweep.size;
  VecF weight[S][K];
#pragma GCC unroll 16
  for (int s = 0; s < S; ++s)
    for (int k = 0; k < K; ++k) weight[s][k] = U::template weight<Both>(w + s * w_tap + k * lanes_f);
#pragma GCC unroll 32
  for (int i = 0; i < P + S - 1; ++i, from += step) {
    in_register(from);
    if (at + i >= size) continue;
    VecF pixel[K];
    U::template load_rows<Both>(from, row, pixel);
    for (int k = 0; k < K; ++k) in_register(pixel[k]);
#pragma GCC unroll 16
    for (int s = 0; s < S; ++s)
      if (i - s >= 0 && i - s < P)
        for (int k = 0; k < K; ++k) U::add(sum[i - s][k], weight[s][k], pixel[k]);
  }
}

// Rows of exactly S taps.
template <typename U, int P, int S>
void slide_tile(Sweep& sweep, const char* from, const float* w, char* to) {
  VecF sum[P][U::vectors] = {};
  each_row<U>(sweep, [&]<bool Both>(int64_t t, int64_t r) __attribute__((always_inline)) {
    slide<U, P, S, Both>(sum, sweep, from + t * sweep.from_t + r * sweep.from_r, w + t * sweep.w_t + r * sweep.w_r,
                         sweep.low);
  });
  finish_tile<U, P>(sweep, from, to, sum);
}

// Longer rows, S taps at a time, and more rows.
template <typename U, int P, int S, bool Blocked>
void slide_on_tile(Sweep& sweep, const char* from, const float* w, char* to) {
  VecF sum[P][U::vectors] = {};
  BlockedSums<VecF, P * U::vectors> blocks;
  each_row<U>(sweep, [&]<bool Both>(int64_t t, int64_t r) __attribute__((always_inline)) {
    const char* f = from + t * sweep.from_t + r * sweep.from_r;
    const float* v = w + t * sweep.w_t + r * sweep.w_r;
    uint64_t at = sweep.low;
    int64_t left = sweep.s;
    for (; left >= S; left -= S, f += S * sweep.from_pixel, v += S * sweep.w_s, at += S) {
      if constexpr (Blocked) blocks.expect(sum[0], S * U::rows);
      slide<U, P, S, Both>(sum, sweep, f, v, at);
    }
    if constexpr (Blocked) blocks.expect(sum[0], left * U::rows);
    for (; left > 0; --left, f += sweep.from_pixel, v += sweep.w_s, ++at) slide<U, P, 1, Both>(sum, sweep, f, v, at);
  });
  if constexpr (Blocked) blocks.finish(sum[0]);
  finish_tile<U, P>(sweep, from, to, sum);
}

template <typename U, bool Blocked, int... I>
constexpr auto sweep_table(std::integer_sequence<int, I...>) {
  struct { Tile of[sizeof...(I)]; } table = {{sweep_tile<U, widths<U>[I], Blocked>...}};
  return table;
}
template <typename U, int S, int... I>
constexpr auto slide_table(std::integer_sequence<int, I...>) {
  struct { Tile of[sizeof...(I)]; } table = {{slide_tile<U, widths<U>[I], S>...}};
  return table;
}
template <typename U, bool Blocked, int... I>
constexpr auto slide_on_table(std::integer_sequence<int, I...>) {
  struct { Tile of[sizeof...(I)]; } table = {{slide_on_tile<U, widths<U>[I], long_slide, Blocked>...}};
  return table;
}
template <typename U, bool Blocked>
constexpr auto sweeps = sweep_table<U, Blocked>(std::make_integer_sequence<int, int(std::size(widths<U>))>());
template <typename U, int S>
constexpr auto sliding = slide_table<U, S>(std::make_integer_sequence<int, int(std::size(widths<U>))>());

template <typename U, bool Blocked>
constexpr auto sliding_on = slide_on_table<U, Blocked>(std::make_integer_sequence<int, int(std::size(widths<U>))>());

// The tiles of a unit, as direct_rows.h wants them.
template <typename U>
struct ChannelTiles {
  static constexpr int vectors = U::vectors;
  static constexpr const auto& widths = convgrad::CONVGRAD_ISA::widths<U>;
  static constexpr int width_count = int(std::size(widths));
  static void prepare(const DirectUnits&, Sweep&) {}
  static const Tile* sweeping(int64_t all) {
    return all > longest_whole ? sweeps<U, true>.of : sweeps<U, false>.of;
  }
  // Of rows of so many taps, and of all of them.
  static const Tile* sliding(int64_t taps, int64_t all) {
    if (all > longest_whole) return sliding_on<U, true>.of;
    switch (taps) {
      case 3: return convgrad::CONVGRAD_ISA::sliding<U, 3>.of;
      case 4: return convgrad::CONVGRAD_ISA::sliding<U, 4>.of;
      case 5: return convgrad::CONVGRAD_ISA::sliding<U, 5>.of;
      case 7: return convgrad::CONVGRAD_ISA::sliding<U, 7>.of;
      default: return sliding_on<U, false>.of;
    }
  }
};

}  // namespace

void correlate_direct(const DirectRows& job) {
#if defined(__AVX512BF16__)
  RowsJob<ChannelTiles<UnitPairs>>(job).run();
#else
  switch (job.units.dtype) {
    case Dtype::bf16: return RowsJob<ChannelTiles<UnitBf16>>(job).run();
#if defined(__F16C__)
    case Dtype::f16: return RowsJob<ChannelTiles<UnitF16>>(job).run();
#endif
    default: return RowsJob<ChannelTiles<UnitF32>>(job).run();
  }
#endif
}

}  // namespace convgrad::CONVGRAD_ISA
