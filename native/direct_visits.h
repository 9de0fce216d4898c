// The visits of a direct weight gradient: which rows and pixels of dy meet which taps; see direct.h.
//
// A kind of tile is a class with the `rows` and `columns` of taps it can have, `most_taps` of them together, the output
// channels (`words`) of a tile and how many `chunks` of them a group has, a table of tiles, whether these ask for every
// row which of their taps land (`asks_rows`), and `prepare`.
#pragma once

#include "direct.h"
#include "lane_elements.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {
namespace {

// The rows and pixels of dy that a tile of taps visits; steps in bytes.
struct Visit {
  int64_t rows, pixels;
  int64_t dy_row, dy_pixel, x_row, x_pixel;  // per output position
  int64_t x_r, x_s;                          // per tap
  int64_t step, tap_step;                    // input pixels per output pixel and per tap
  int64_t first, size;                       // the input pixel of output pixel 0 and tap 0; input pixels of a row
  int64_t inner_low, inner_high;             // output pixels whose taps all land
  int64_t y_step, y_tap_step, y_first, y_size;  // as the four above along y; for tiles that ask which rows land
  // What the next box will read, fetched line after line, whatever order the tiles have: the hardware sees streams.
  const char *dy_next, *x_next;              // null: nothing to fetch
  int64_t x_lines;                           // per line of dy
  int64_t sum_r, sum_s;                      // floats
  // Of groups: the output channels of a lane's group that a tile has, and where they are among 16 of dy.
  int64_t chunk, sum_word;
  void* fetcher;
  int32_t first_word[16];
};

// NOTE: into the second-level cache only: fetches into the first would hold the buffers that its own misses need
// (mobilenetv2_dw_32_112 f32 on Zen 4: 7.9 -> 4.9 ms).
CONVGRAD_INLINE void fetch(Visit& v, int pixels, int bytes) {
  if (!v.dy_next) return;
  for (int i = 0; i < pixels; ++i) __builtin_prefetch(v.dy_next + i * bytes, 0, 2);
  for (int i = 0; i < pixels * v.x_lines; ++i) __builtin_prefetch(v.x_next + i * bytes, 0, 2);
  v.dy_next += pixels * bytes;
  v.x_next += pixels * v.x_lines * bytes;
}

using Tile = void (*)(Visit&, const char*, const char*, float*);

template <typename T>
struct WeightJob {
  const DirectWeightGrad& job;
  const Geometry& g;
  const int64_t unit, bytes;  // floats of one tap; of an element
  Visit v{};
  const char *dy_next, *x_next;
  int64_t dy_channel = 0, x_channel = 0;  // bytes

  explicit WeightJob(const DirectWeightGrad& j)
      : job(j), g(*j.geo), unit(j.units.unit()), bytes(size_of(j.units.dtype)) {
    v.pixels = j.pixels;
    v.dy_row = j.dy_stride[axis_h];
    v.dy_pixel = j.dy_stride[axis_w];
    v.x_row = j.x_stride[axis_h] * g.stride[1];
    v.x_pixel = j.x_stride[axis_w] * g.stride[2];
    v.x_r = j.x_stride[axis_h] * g.dilation[1];
    v.x_s = j.x_stride[axis_w] * g.dilation[2];
    v.step = g.stride[2];
    v.tap_step = g.dilation[2];
    v.size = g.in[2];
    v.y_step = g.stride[1];
    v.y_tap_step = g.dilation[1];
    v.y_size = g.in[1];
    // What comes next lies beside this box, in the next plane, or below it, where x shares rows with this box. Every
    // box fetches as many rows as it has itself, all at one distance: so nothing is left out where the last is lower.
    const bool part = j.pixels < g.out[2], behind = !part && j.z + 1 < g.out[0];
    const int64_t below = part || behind ? 0 : j.full_rows, halo = part || behind ? 0 : (g.kernel[1] - 1) * g.dilation[1];
    const int64_t y = j.first * g.stride[1] - g.pad[1] + halo;
    const int64_t x = j.first_pixel * g.stride[2] - g.pad[2] + (part ? (g.kernel[2] - 1) * g.dilation[2] : 0);
    const int64_t z = (j.z + behind) * g.stride[0] + (g.kernel[0] - 1) * g.dilation[0] - g.pad[0];
    dy_next = j.dy + (j.z + behind) * j.dy_stride[axis_d] + (j.first + below) * v.dy_row +
              (j.first_pixel + (part ? j.pixels : 0)) * v.dy_pixel;
    x_next = j.x + z * j.x_stride[axis_d] + y * j.x_stride[axis_h] + x * j.x_stride[axis_w] + below * v.x_row +
             (part ? j.pixels * v.x_pixel : 0);
    v.x_lines = g.stride[2] * (part ? 1 : g.stride[1]);
    v.sum_s = unit;
    v.sum_r = unit * g.kernel[2];
    v.sum_word = unit * g.taps();
    v.fetcher = j.fetcher;
    T::prepare(j.units, v);
  }

  bool slides() const { return g.stride[2] == 1 && g.dilation[2] == 1; }

  // The largest choice that is at most `left` and, with `other`, leaves registers enough; an index.
  template <typename Choices>
  static int fitting(const Choices& choices, int64_t left, int other) {
    int best = 0;
    for (int i = 0; i < int(std::size(choices)); ++i)
      if (choices[i] <= left && choices[i] * other <= T::most_taps) best = i;
    return best;
  }

  // Rows [y.low, y.high) of dy with a tile of taps. A tile sums some pixels in registers before it adds them to the
  // sums in memory: no term passes through many roundings (docs/contract.md).
  void visit(int64_t t, int64_t r, int r_index, int64_t s, int s_index, Range y, float* sums) {
    constexpr int64_t longest = 512;
    const int64_t pixels = job.pixels < longest ? job.pixels : longest, rows = longest / pixels;
    for (int64_t row = y.low; row < y.high; row += rows)
      for (int64_t pixel = 0; pixel < job.pixels; pixel += pixels) {
        v.rows = y.high - row < rows ? y.high - row : rows;
        v.pixels = job.pixels - pixel < pixels ? job.pixels - pixel : pixels;
        visit_some(t, r, r_index, s, s_index, row, job.first_pixel + pixel, sums);
      }
  }

  // The pixels of dy from (y, first_pixel) on.
  void visit_some(int64_t t, int64_t r, int r_index, int64_t s, int s_index, int64_t y, int64_t first_pixel,
                  float* sums) {
    const int sn = T::columns[s_index];
    v.first = first_pixel * g.stride[2] + s * g.dilation[2] - g.pad[2];
    const Range first = landing(g, 2, s, first_pixel, v.pixels);
    const Range last = landing(g, 2, s + sn - 1, first_pixel, v.pixels);
    v.inner_low = (last.low > first.low ? last.low : first.low) - first_pixel;
    v.inner_high = (last.high < first.high ? last.high : first.high) - first_pixel;
    if (v.inner_low >= v.inner_high) v.inner_low = v.inner_high = v.pixels;
    const int64_t in_z = job.z * g.stride[0] + t * g.dilation[0] - g.pad[0];
    const int64_t in_y = v.y_first = y * g.stride[1] + r * g.dilation[1] - g.pad[1];
    const char* dy = job.dy + dy_channel + job.z * job.dy_stride[axis_d] + y * job.dy_stride[axis_h] +
                     first_pixel * v.dy_pixel;
    const char* x = job.x + x_channel + in_z * job.x_stride[axis_d] + in_y * job.x_stride[axis_h] +
                    v.first * job.x_stride[axis_w];
    const Tile tile = T::tile(slides() && sn > 1, r_index, s_index);
    tile(v, dy, x, sums + ((t * g.kernel[1] + r) * g.kernel[2] + s) * unit);
  }

  // A tile of taps. Rows that some of its taps do not reach are visited tap row by tap row, unless its tiles ask.
  void taps(int64_t t, int64_t r, int r_index, int64_t s, int s_index, float* sums) {
    const int rn = T::rows[r_index];
    Range common{job.first, job.first + job.rows}, rows[8];
    for (int i = 0; i < rn; ++i) {
      rows[i] = landing(g, 1, r + i, job.first, job.rows);
      if (rows[i].low > common.low) common.low = rows[i].low;
      if (rows[i].high < common.high) common.high = rows[i].high;
    }
    if (T::asks_rows) {  // all rows from the first that some tap reaches to the last
      Range reached{job.first + job.rows, job.first};
      for (int i = 0; i < rn; ++i) {
        if (rows[i].low == rows[i].high) continue;
        if (rows[i].low < reached.low) reached.low = rows[i].low;
        if (rows[i].high > reached.high) reached.high = rows[i].high;
      }
      common = reached;
    }
    const bool some = common.low < common.high;
    visit(t, r, r_index, s, s_index, common, sums);
    if (v.dy_next) dy_next = v.dy_next, x_next = v.x_next;
    v.dy_next = v.x_next = nullptr;
    if (rn == 1 || T::asks_rows) return;
    for (int i = 0; i < rn; ++i) {
      visit(t, r + i, 0, s, s_index, {rows[i].low, some ? common.low : rows[i].high}, sums);
      if (some) visit(t, r + i, 0, s, s_index, {common.high, rows[i].high}, sums);
    }
  }

  void run() {
    const int64_t depth = g.kernel[0], R = g.kernel[1], S = g.kernel[2], entries = g.taps() + job.bias;
    // The tile of taps with the most sums: long rows of taps share more of what is read.
    const int s_most = fitting(T::columns, S, 1);
    const int r_most = fitting(T::rows, R, T::columns[s_most]);
    const int64_t chunks = T::chunks(job.units), chunk_floats = T::words * entries * unit;
    for (int64_t i = job.first_unit * chunks; i < (job.first_unit + job.unit_count) * chunks; ++i) {
      x_channel = job.units.first(i / chunks) * bytes;
      dy_channel = job.units.source(i / chunks) * bytes;
      v.chunk = i % chunks;
      float* sums = job.sums + i * chunk_floats;
      v.dy_next = dy_next;  // the tile that comes first fetches
      v.x_next = x_next;
      for (int64_t t = 0; t < depth; ++t) {
        if (landing(g, 0, t, job.z, 1).high == landing(g, 0, t, job.z, 1).low) continue;
        for (int64_t r = 0; r < R;) {
          const int r_index = fitting(T::rows, R - r < T::rows[r_most] ? R - r : T::rows[r_most],
                                      T::columns[s_most]);
          for (int64_t s = 0; s < S;) {
            const int s_index = fitting(T::columns, S - s, T::rows[r_index]);
            taps(t, r, r_index, s, s_index, sums);
            s += T::columns[s_index];
          }
          r += T::rows[r_index];
        }
      }
      if (job.bias) T::sum_rows(job, v, dy_channel, sums + (entries - 1) * unit);
    }
  }
};

}  // namespace
}  // namespace convgrad::CONVGRAD_ISA
#endif
