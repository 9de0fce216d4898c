// Output and input gradient of depthwise convolutions where the tensors lie, channels last; see direct.h.
#include <utility>

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

template <typename U> constexpr int width_count = U::vectors == 1 ? int(std::size(widths_one)) : int(std::size(widths_two));
template <typename U> constexpr int width_of(int i) { return U::vectors == 1 ? widths_one[i] : widths_two[i]; }

// What the tiles of one row share; from and to in bytes, weights in floats.
struct Sweep {
  int64_t t, r, s;
  int64_t from_t, from_r, from_s, from_pixel;
  int64_t w_t, w_r, w_s;
  int64_t to_pixel;
  int64_t step, tap_step;    // source pixels from one result pixel, and from one tap, to the next
  uint64_t low, size;        // a source pixel, counted from the tile's first, lies in the tensor if it + low < size
  // What the next row will read: fetched line after line, whatever order the tiles have, so that the hardware sees a
  // stream (lines > 0), or as the tiles will read it, `ahead` bytes after what they read now.
  const char* next;
  int64_t lines, ahead;
  bool stream;
};

template <typename U>
using Tile = void (*)(Sweep& sweep, const char* from, const float* w, char* to);

template <typename U, int P>
CONVGRAD_INLINE void finish_tile(Sweep& sweep, const char* from, char* to, VecF (*sum)[U::vectors]) {
  if (sweep.lines) {
    for (int64_t i = 0; i < sweep.lines; ++i, sweep.next += 64) __builtin_prefetch(sweep.next);
  } else {
    for (int p = 0; p < P; ++p) __builtin_prefetch(from + sweep.ahead + p * sweep.from_pixel);
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; ++p) U::store(to + p * sweep.to_pixel, sum[p], sweep.stream);
}

// NOTE: keeps a value in a register. GCC 12 would read a pixel again for each of its products, and hold the addresses
// of all pixels at once where one that moves along is enough.
CONVGRAD_INLINE void in_register(const char*& p) { asm("" : "+r"(p)); }
CONVGRAD_INLINE void in_register(VecF& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#endif
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

// P result pixels; every tap reads its own source pixels.
template <typename U, int P>
void sweep_tile(Sweep& sweep, const char* from, const float* w, char* to) {
  constexpr int K = U::vectors;
  VecF sum[P][K] = {};
  each_row<U>(sweep, [&]<bool Both>(int64_t t, int64_t r) __attribute__((always_inline)) {
    const char* f = from + t * sweep.from_t + r * sweep.from_r;
    const float* v = w + t * sweep.w_t + r * sweep.w_r;
    uint64_t at = sweep.low;
    for (int64_t s = 0; s < sweep.s; ++s, f += sweep.from_s, v += sweep.w_s, at += uint64_t(sweep.tap_step)) {
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

// Longer rows, S taps at a time.
template <typename U, int P, int S>
void slide_on_tile(Sweep& sweep, const char* from, const float* w, char* to) {
  VecF sum[P][U::vectors] = {};
  each_row<U>(sweep, [&]<bool Both>(int64_t t, int64_t r) __attribute__((always_inline)) {
    const char* f = from + t * sweep.from_t + r * sweep.from_r;
    const float* v = w + t * sweep.w_t + r * sweep.w_r;
    uint64_t at = sweep.low;
    int64_t left = sweep.s;
    for (; left >= S; left -= S, f += S * sweep.from_pixel, v += S * sweep.w_s, at += S)
      slide<U, P, S, Both>(sum, sweep, f, v, at);
    for (; left > 0; --left, f += sweep.from_pixel, v += sweep.w_s, ++at) slide<U, P, 1, Both>(sum, sweep, f, v, at);
  });
  finish_tile<U, P>(sweep, from, to, sum);
}

template <typename U, int... I>
constexpr auto sweep_table(std::integer_sequence<int, I...>) {
  struct { Tile<U> of[sizeof...(I)]; } table = {{sweep_tile<U, width_of<U>(I)>...}};
  return table;
}
template <typename U, int S, int... I>
constexpr auto slide_table(std::integer_sequence<int, I...>) {
  struct { Tile<U> of[sizeof...(I)]; } table = {{slide_tile<U, width_of<U>(I), S>...}};
  return table;
}
template <typename U, int... I>
constexpr auto slide_on_table(std::integer_sequence<int, I...>) {
  struct { Tile<U> of[sizeof...(I)]; } table = {{slide_on_tile<U, width_of<U>(I), long_slide>...}};
  return table;
}
template <typename U>
constexpr auto sweeps = sweep_table<U>(std::make_integer_sequence<int, width_count<U>>());
template <typename U, int S>
constexpr auto sliding = slide_table<U, S>(std::make_integer_sequence<int, width_count<U>>());

template <typename U>
constexpr auto sliding_on = slide_on_table<U>(std::make_integer_sequence<int, width_count<U>>());

template <typename U>
const Tile<U>* sliding_tiles(int64_t taps) {
  switch (taps) {
    case 3: return sliding<U, 3>.of;
    case 4: return sliding<U, 4>.of;
    case 5: return sliding<U, 5>.of;
    case 7: return sliding<U, 7>.of;
    default: return sliding_on<U>.of;
  }
}

// The width whose tiles cost least; the last tile overlaps its neighbour.
template <typename U>
int choose_width(int64_t pixels, int64_t taps) {
  int best = 0;
  double least = -1;
  for (int i = 0; i < width_count<U>; ++i) {
    const int width = width_of<U>(i);
    if (width > pixels) continue;
    const double sums = width * U::vectors, per_tap = sums < 4 ? 4 : sums;
    const double cost = double((pixels + width - 1) / width) * (per_tap * double(taps) + U::vectors * double(taps) + 8);
    if (least < 0 || cost < least) least = cost, best = i;
  }
  return best;
}

// The taps [low, high) of position j whose source lies in [0, size).
struct TapRange { int64_t low, high; };

TapRange landing(const LanePhase& phase, int64_t j, int64_t size) {
  const int64_t at = phase.source + j * phase.source_step, step = phase.source_tap_step;
  int64_t low = 0, high = phase.taps;
  while (low < high && (at + low * step < 0 || at + low * step >= size)) ++low;
  while (low < high && (at + (high - 1) * step < 0 || at + (high - 1) * step >= size)) --high;
  return {low, high};
}

template <typename U>
struct RowsJob {
  const DirectRows& job;
  const int64_t unit_floats;  // of the weights of one tap
  Sweep sweep{};
  bool whole = false;               // all units of a pixel go together
  int64_t from_row = 0, w_row = 0;  // where the first landing tap of the row reads

  explicit RowsJob(const DirectRows& j) : job(j), unit_floats(j.units.unit()) { sweep.stream = j.stream; }

  // The taps of axis z or y that reach position `at`; moves the row's start to the first of them.
  int64_t take_axis(int axis, int64_t at, int64_t& from_step, int64_t& w_step) {
    const LanePhase& phase = job.phase[axis][at % job.phases[axis]];
    const int64_t j = (at - phase.first) / phase.step, line = job.from_stride[axis_d + axis];
    const int64_t w_tap = job.weight_tap[axis] * unit_floats;
    const TapRange taps = landing(phase, j, job.source_size[axis]);
    from_step = phase.source_tap_step * line;
    w_step = phase.tap_step * w_tap;
    from_row += (phase.source + j * phase.source_step + taps.low * phase.source_tap_step) * line;
    w_row += (phase.tap_first + taps.low * phase.tap_step) * w_tap;
    return taps.high - taps.low;
  }

  void zero(char* to, int64_t pixels, int64_t step, int64_t first_unit, int64_t units) const {
    const VecF none[U::vectors] = {};
    for (int64_t p = 0; p < pixels; ++p, to += step)
      for (int64_t u = first_unit; u < first_unit + units; ++u)
        U::store(to + offset(u), none, false);
  }

  int64_t offset(int64_t unit) const { return job.units.first(unit) * (U::bytes / unit_floats); }

  void x_phase(const LanePhase& phase, char* row, int64_t first_unit, int64_t units) {
    if (phase.first >= job.width) return;
    const int64_t pixels = (job.width - 1 - phase.first) / phase.step + 1;
    char* to = row + phase.first * job.to_stride[axis_w];
    sweep.to_pixel = phase.step * job.to_stride[axis_w];
    if (phase.taps == 0 || sweep.t <= 0 || sweep.r <= 0) return zero(to, pixels, sweep.to_pixel, first_unit, units);
    const int64_t pixel = job.from_stride[axis_w];
    int64_t source = phase.source, tap_first = phase.tap_first;
    sweep.s = phase.taps;
    sweep.step = phase.source_step;
    sweep.tap_step = phase.source_tap_step;
    sweep.from_pixel = phase.source_step * pixel;
    sweep.w_s = phase.tap_step * job.weight_tap[2] * unit_floats;
    const bool slide = phase.source_step == 1 && (sweep.tap_step == 1 || sweep.tap_step == -1) && phase.taps >= 3;
    if (slide && sweep.tap_step < 0) {  // start at the last tap, read forwards
      source += (phase.taps - 1) * sweep.tap_step;
      tap_first += (phase.taps - 1) * phase.tap_step;
      sweep.tap_step = -sweep.tap_step;
      sweep.w_s = -sweep.w_s;
    }
    sweep.from_s = sweep.tap_step * pixel;
    sweep.size = uint64_t(job.source_size[2]);
    const int index = choose_width<U>(pixels, phase.taps * sweep.r * sweep.t);
    const Tile<U> tile = slide ? sliding_tiles<U>(phase.taps)[index] : sweeps<U>.of[index];
    const int64_t width = width_of<U>(index);
    const bool tall = job.source_size[1] > 1;
    sweep.ahead = tall ? (sweep.from_r < 0 ? job.from_stride[axis_h] : sweep.r * job.from_stride[axis_h])
                       : width * sweep.from_pixel + (sweep.from_s > 0 ? (sweep.s - 1) * sweep.from_s : 0);
    if (sweep.from_t > 0) sweep.ahead += (sweep.t - 1) * sweep.from_t;
    sweep.lines = 0;
    if (tall && whole && job.from_stride[axis_w] == job.units.channels * (U::bytes / unit_floats)) {
      const int64_t share = width * job.source_size[2] * U::bytes / (64 * job.width);
      sweep.lines = share > 0 ? share : 1;
      if (&phase == job.phase[2]) sweep.next = job.from + from_row + sweep.ahead;
    }
    const float* w = job.weights + w_row + tap_first * job.weight_tap[2] * unit_floats;
    for (int64_t p = 0; p < pixels; p += width) {
      if (p + width > pixels) p = pixels - width;
      const int64_t at = source + p * phase.source_step;
      const char* from = job.from + from_row + at * pixel;
      sweep.low = uint64_t(at);
      for (int64_t u = first_unit; u < first_unit + units; ++u)
        tile(sweep, from + offset(u), w + u * job.taps * unit_floats, to + p * sweep.to_pixel + offset(u));
    }
  }

  void run() {
    // Units whose weights stay in the first-level cache together, and a stretch of memory worth reading at once.
    const int64_t unit_bytes = job.taps * unit_floats * 4, fit = (24 << 10) / unit_bytes;
    const int64_t units = job.unit_count, most = fit < 4 ? 4 : fit;
    const int64_t pieces = (units + most - 1) / most;
    whole = pieces == 1 && units == job.units.units();
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t first_unit = job.first_unit + units * i / pieces;
      const int64_t count = job.first_unit + units * (i + 1) / pieces - first_unit;
      for (int64_t z = job.first[0]; z < job.first[0] + job.extent[0]; ++z)
        for (int64_t y = job.first[1]; y < job.first[1] + job.extent[1]; ++y) {
          from_row = w_row = 0;
          sweep.t = take_axis(0, z, sweep.from_t, sweep.w_t);
          sweep.r = take_axis(1, y, sweep.from_r, sweep.w_r);
          char* row = job.to + z * job.to_stride[axis_d] + y * job.to_stride[axis_h];
          for (int64_t x = 0; x < job.phases[2]; ++x) x_phase(job.phase[2][x], row, first_unit, count);
        }
    }
#if CONVGRAD_VECTOR_BYTES == 64
    if (job.stream) _mm_sfence();
#endif
  }
};

}  // namespace

void correlate_direct(const DirectRows& job) {
#if defined(__AVX512BF16__)
  RowsJob<UnitPairs>(job).run();
#else
  switch (job.units.dtype) {
    case Dtype::bf16: return RowsJob<UnitBf16>(job).run();
#if defined(__F16C__)
    case Dtype::f16: return RowsJob<UnitF16>(job).run();
#endif
    default: return RowsJob<UnitF32>(job).run();
  }
#endif
}

}  // namespace convgrad::CONVGRAD_ISA
