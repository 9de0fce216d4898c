// The rows of a direct correlation: which taps land, tiles of pixels, units of channels; see direct.h.
//
// A kind of tile is a class with `vectors` sums per pixel, `widths` in pixels, tables of tiles by width for sliding and
// other taps, and `prepare`, which sets what its tiles need of a sweep.
#pragma once

#include "direct.h"
#include "lane_elements.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {
namespace {

// What the tiles of one row share; from and to in bytes, weights in floats.
struct Sweep {
  int64_t t, r, s;
  int64_t from_t, from_r, from_s, from_pixel;
  int64_t w_t, w_r, w_s;
  int64_t to_pixel, to_row;
  int64_t step, tap_step;    // source pixels from one result pixel, and from one tap, to the next
  uint64_t low, size;        // a source pixel, counted from the tile's first, lies in the tensor if it + low < size
  // What the next row will read: fetched line after line, whatever order the tiles have, so that the hardware sees a
  // stream (lines > 0), or as the tiles will read it, `ahead` bytes after what they read now.
  const char* next;
  int64_t lines, ahead;
  bool stream;
  // Of groups: 32-bit words of source channels, in chunks; the word of a lane's group that comes first.
  int64_t chunks;
  int32_t first_word[16];
};

using Tile = void (*)(Sweep& sweep, const char* from, const float* w, char* to);

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

// Writes `bytes` around the caches, wherever they begin in a line.
static inline void stream_row(const char* from, char* to, int64_t bytes) {
#if CONVGRAD_VECTOR_BYTES == 64
  const int64_t ahead = -intptr_t(to) & 63, head = ahead < bytes ? ahead : bytes, tail = (bytes - head) % 64;
  __builtin_memcpy(to, from, size_t(head));
  for (int64_t i = head; i < bytes - tail; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  from += bytes - tail, to += bytes - tail, bytes = tail;
#endif
  __builtin_memcpy(to, from, size_t(bytes));
}

// The width whose tiles cost least; the last tile overlaps its neighbour.
template <typename U>
int choose_width(int64_t pixels, int64_t taps) {
  int best = 0;
  double least = -1;
  for (int i = 0; i < U::width_count; ++i) {
    const int width = U::widths[i];
    if (width > pixels) continue;
    const double sums = width * U::vectors, per_tap = sums < 4 ? 4 : sums;
    const double cost = double((pixels + width - 1) / width) * (per_tap * double(taps) + U::vectors * double(taps) + 8);
    if (least < 0 || cost < least) least = cost, best = i;
  }
  return best;
}

template <typename U>
struct RowsJob {
  const DirectRows& job;
  const int64_t unit_floats, bytes;  // of the weights of one tap; of an element
  Sweep sweep{};
  bool whole = false;               // all units of a pixel go together
  int64_t from_row = 0, w_row = 0;  // where the first landing tap of the row reads
  // The widths chosen last, by phase: choosing takes as long as a small tile.
  struct Width {
    int64_t pixels = 0, taps = 0;
    int index = 0;
  } chosen[4];

  explicit RowsJob(const DirectRows& j) : job(j), unit_floats(j.units.tap_floats()), bytes(size_of(j.units.dtype)) {
    sweep.stream = j.stream;
    sweep.to_row = j.to_stride[axis_h];
    U::prepare(j.units, sweep);
  }

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

  int width_index(const LanePhase& phase, int64_t pixels) {
    Width& last = chosen[(&phase - job.phase[2]) % 4];
    if (last.pixels != pixels || last.taps != phase.taps)
      last = {pixels, phase.taps, choose_width<U>(pixels, phase.taps * job.phase[1]->taps * job.phase[0]->taps)};
    return last.index;
  }

  void zero(char* to, int64_t pixels, int64_t step, int64_t first_unit, int64_t units) const {
    for (int64_t p = 0; p < pixels; ++p, to += step)
      for (int64_t u = first_unit; u < first_unit + units; ++u)
        __builtin_memset(to + job.units.first(u) * bytes, 0, size_t(job.units.unit() * bytes));
  }

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
    const int index = width_index(phase, pixels);
    const int64_t taps = sweep.t * sweep.r * phase.taps;
    const Tile tile = slide ? U::sliding(phase.taps, taps)[index] : U::sweeping(taps)[index];
    const int64_t width = U::widths[index];
    const bool tall = job.source_size[1] > 1;
    sweep.ahead = tall ? (sweep.from_r < 0 ? job.from_stride[axis_h] : sweep.r * job.from_stride[axis_h])
                       : width * sweep.from_pixel + (sweep.from_s > 0 ? (sweep.s - 1) * sweep.from_s : 0);
    if (sweep.from_t > 0) sweep.ahead += (sweep.t - 1) * sweep.from_t;
    sweep.lines = 0;
    if (tall && whole && pixel == job.units.source_channels() * bytes) {
      const int64_t row = job.source_size[2] * pixel * job.phase[1]->source_step;
      const int64_t share = width * row / (64 * job.width * job.unit_count);
      sweep.lines = share > 0 ? share : 1;
      if (&phase == job.phase[2] && first_unit == job.first_unit) sweep.next = job.from + from_row + sweep.ahead;
    }
    const float* w = job.weights + w_row + tap_first * job.weight_tap[2] * unit_floats;
    for (int64_t p = 0; p < pixels; p += width) {
      if (p + width > pixels) p = pixels - width;
      const int64_t at = source + p * phase.source_step;
      const char* from = job.from + from_row + at * pixel;
      sweep.low = uint64_t(at);
      for (int64_t u = first_unit; u < first_unit + units; ++u)
        tile(sweep, from + job.units.source(u) * bytes, w + u * job.taps * unit_floats,
             to + p * sweep.to_pixel + job.units.first(u) * bytes);
    }
  }

  void run() {
    // Units whose weights stay in the first-level cache together, and a stretch of memory worth reading at once.
    const int64_t unit_bytes = job.taps * unit_floats * 4, fit = (24 << 10) / unit_bytes;
    const int64_t least = job.units.group_to ? 1 : 4;
    const int64_t units = job.unit_count, most = fit < least ? least : fit;
    const int64_t pieces = (units + most - 1) / most;
    // Units of one group read the same pixels: these go by once, row by row. So do pixels that meet few weights each.
    const bool alone = job.units.group_to && (job.units.group_to == job.units.channels ||
                                              (job.taps == 1 && units * unit_bytes <= 128 << 10));
    whole = (pieces == 1 || alone) && units == job.units.units();
    const int64_t sweeps = alone ? 1 : pieces;
    char* const together = whole ? job.row : nullptr;
    for (int64_t i = 0; i < sweeps; ++i)
      for (int64_t z = job.first[0]; z < job.first[0] + job.extent[0]; ++z)
        for (int64_t y = job.first[1]; y < job.first[1] + job.extent[1]; ++y) {
          from_row = w_row = 0;
          sweep.t = take_axis(0, z, sweep.from_t, sweep.w_t);
          sweep.r = take_axis(1, y, sweep.from_r, sweep.w_r);
          char* const to = job.to + z * job.to_stride[axis_d] + y * job.to_stride[axis_h];
          char* const row = together ? together : to;
          for (int64_t piece = i; piece < pieces; piece += sweeps) {
            const int64_t first_unit = job.first_unit + units * piece / pieces;
            const int64_t count = job.first_unit + units * (piece + 1) / pieces - first_unit;
            for (int64_t x = 0; x < job.phases[2]; ++x) x_phase(job.phase[2][x], row, first_unit, count);
          }
          if (together) stream_row(row, to, job.width * job.to_stride[axis_w]);
        }
#if CONVGRAD_VECTOR_BYTES == 64
    if (job.stream || together) _mm_sfence();
#endif
  }
};

}  // namespace
}  // namespace convgrad::CONVGRAD_ISA
#endif
