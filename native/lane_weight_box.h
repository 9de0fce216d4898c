// A weight gradient of slabs: which rows of dy meet which taps, and in which tiles; see LaneWeightGrad in lanes.h.
//
// A tile has the sums of some parts of dy with some lines of x (rows of taps, of one part of x or of several) through
// some columns of taps. A kind of tile is a class with the element types `X`, `Dy` and `Sum`, the `most_sums`,
// `most_parts` and `most_lines` of a tile, the least cycles a step takes (`latency`), the roundings of one, and a function
// `tile`.
#pragma once

#include "lane_io.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {
namespace {

constexpr int widest_s = 8, tallest_r = 8;

// The pixels one tile visits: `rows` rows of `pixels` (of pairs of them); steps in elements.
struct Visit {
  int64_t planes, rows, pixels;
  int64_t dy_channel, dy_plane, dy_row;
  int64_t x_plane, x_row, x_pixel;  // per step of the output position
  int64_t x_line[tallest_r], sum_line[tallest_r];  // from the first line
  int64_t x_column[widest_s];                      // from the first column of taps
  int64_t sum_channel, sum_s;
};

// What one tile has of the parts of dy, parts of x, rows and columns of taps.
struct TileShape {
  int k, c, r, s;
};

// The outputs of [first, first+count) whose input for tap k lies in the tensor, relative to `first`.
Range landing_from(const Geometry& g, int axis, int64_t k, int64_t first, int64_t count) {
  const Range outputs = landing(g, axis, k, first, count);
  return outputs.low < outputs.high ? Range{outputs.low - first, outputs.high - first} : Range{0, 0};
}

template <typename Kind>
struct BoxJob {
  using X = typename Kind::X;
  using Dy = typename Kind::Dy;
  using Sum = typename Kind::Sum;
  static constexpr int L = lanes_of<Sum>;
  const LaneWeightGrad& job;
  const Geometry& g;
  const bool given;
  const int64_t x_lanes, dy_lanes, columns;
  Visit v{};
  int64_t x_line, x_channel, sum_r, sum_c;

  explicit BoxJob(const LaneWeightGrad& j)
      : job(j), g(*j.geo), given(j.x_line > 0), x_lanes(j.x_broadcast ? 1 : L), dy_lanes(j.dy_broadcast ? 1 : L),
        columns(given ? j.columns : j.geo->kernel[2]) {
    x_line = given ? j.x_line : j.x_box.extent[2] * x_lanes;
    const int64_t x_plane = x_line * j.x_box.extent[1];
    x_channel = given ? j.x_part : x_plane * j.x_box.extent[0];
    v.dy_row = pixels() * dy_lanes;
    v.dy_plane = v.dy_row * j.dy_box.extent[1];
    v.dy_channel = v.dy_plane * j.dy_box.extent[0];
    v.x_plane = x_plane * g.stride[0];
    v.x_row = x_line * g.stride[1];
    v.x_pixel = given ? j.x_step : x_lanes * g.stride[2];
    v.sum_s = L;
    sum_r = L * columns;
    sum_c = sum_r * g.kernel[0] * g.kernel[1];
    v.sum_channel = sum_c * j.sum_step;
    if (j.images > 1) {  // dy has one plane: images take the place of planes
      v.dy_plane = j.dy_image;
      v.x_plane = j.x_image;
    }
  }

  int64_t pixels() const { return given ? job.dy_width : job.dy_box.extent[2]; }
  // Elements from the first pixel of a row of x to the one that output 0 of the box sees through a column of taps.
  int64_t column_at(int64_t s) const {
    if (given) return job.column[s];
    return (job.dy_box.first[2] * g.stride[2] + s * g.dilation[2] - g.pad[2] - job.x_box.first[2]) * x_lanes;
  }
  // Element offset in the x slab of row (z, y) of the box seen through tap (t, r) and column s.
  int64_t x_at(int64_t z, int64_t y, int64_t t, int64_t r, int64_t s) const {
    const int64_t out[2] = {z, y}, tap[2] = {t, r};
    int64_t at[2];
    for (int a = 0; a < 2; ++a)
      at[a] = (job.dy_box.first[a] + out[a]) * g.stride[a] + tap[a] * g.dilation[a] - g.pad[a] - job.x_box.first[a];
    return (at[0] * job.x_box.extent[1] + at[1]) * x_line + column_at(s);
  }

  // Planes z, rows y, pixels q of the box for the parts and taps from (k, c, t, r, s) on. A tile sums some pixels in
  // registers before it adds them to the sums in memory: no term passes through many roundings (docs/contract.md).
  void visit(TileShape n, int64_t k, int64_t c, int64_t t, int64_t r, int64_t s, Range z, Range y, Range q) {
    const int64_t width = q.high - q.low, planes = (z.high - z.low) * job.images;
    if (planes <= 0 || y.high <= y.low || width <= 0) return;
    for (int i = 0; i < n.c * n.r; ++i) {
      v.x_line[i] = i / n.r * x_channel + i % n.r * x_line * g.dilation[1];
      v.sum_line[i] = i / n.r * sum_c + i % n.r * sum_r;
    }
    for (int i = 0; i < n.s; ++i) v.x_column[i] = column_at(s + i) - column_at(s);
    constexpr int64_t longest = 512 / Kind::roundings;  // pixels, or pairs of them
    const int64_t pixels = width < longest ? width : longest;
    const int64_t rows = longest / pixels < y.high - y.low ? longest / pixels : y.high - y.low;
    const int64_t deep = longest / (pixels * rows) < planes ? longest / (pixels * rows) : planes;
    for (int64_t plane = 0; plane < planes; plane += deep)
      for (int64_t row = y.low; row < y.high; row += rows)
        for (int64_t first = q.low; first < q.high; first += pixels) {
          v.planes = planes - plane < deep ? planes - plane : deep;
          v.rows = y.high - row < rows ? y.high - row : rows;
          v.pixels = q.high - first < pixels ? q.high - first : pixels;
          visit_some(n, k, c, t, r, s, z.low, plane, row, first);
        }
  }

  // The pixels from plane z + `plane` (or image `plane`, where there are several), row y and pixel q on.
  void visit_some(TileShape n, int64_t k, int64_t c, int64_t t, int64_t r, int64_t s, int64_t z, int64_t plane,
                  int64_t y, int64_t q) {
    const Dy* dy = static_cast<const Dy*>(job.dy) + k * v.dy_channel + (z + plane) * v.dy_plane + y * v.dy_row +
                   q * dy_lanes;
    const X* x = static_cast<const X*>(job.x) + c * x_channel + x_at(z, y, t, r, s) + plane * v.x_plane + q * v.x_pixel;
    Sum* sums = static_cast<Sum*>(job.sums) + k * v.sum_channel + c * sum_c + (t * g.kernel[1] + r) * sum_r + s * L;
    Kind::tile(job, n.k, n.c * n.r, n.s)(v, dy, x, sums);
  }

  // Rows that some taps of a tile do not reach are visited tap row by tap row.
  void taps(TileShape n, int64_t k, int64_t c, int64_t t, int64_t r, int64_t s) {
    const Range z = landing_from(g, 0, t, job.dy_box.first[0], job.dy_box.extent[0]);
    const Range all{0, pixels()};
    Range common{0, job.dy_box.extent[1]};
    Range rows[tallest_r];
    for (int i = 0; i < n.r; ++i) {
      rows[i] = landing_from(g, 1, r + i, job.dy_box.first[1], job.dy_box.extent[1]);
      if (rows[i].low > common.low) common.low = rows[i].low;
      if (rows[i].high < common.high) common.high = rows[i].high;
    }
    if (common.high <= common.low) common = {0, 0};
    visit(n, k, c, t, r, s, z, common, all);
    if (n.r == 1) return;
    const TileShape row{n.k, n.c, 1, n.s};
    for (int i = 0; i < n.r; ++i) {
      if (common.high == 0) {
        visit(row, k, c, t, r + i, s, z, rows[i], all);
      } else {
        visit(row, k, c, t, r + i, s, z, {rows[i].low, common.low}, all);
        visit(row, k, c, t, r + i, s, z, {common.high, rows[i].high}, all);
      }
    }
  }

  void careful_tap(int64_t k, int64_t c, int64_t t, int64_t r, int64_t s) {
    Range land[3];
    const int64_t tap[3] = {t, r, s};
    for (int a = 0; a < 3; ++a) land[a] = landing_from(g, a, tap[a], job.dy_box.first[a], job.dy_box.extent[a]);
    visit({1, 1, 1, 1}, k, c, t, r, s, land[0], land[1], land[2]);
  }

  // The shape with the fewest cycles: one per product or load, never fewer than the latency of a chain of sums, and
  // some for every row.
  TileShape choose_tile() const {
    const int64_t K = job.out_parts, C = job.in_parts, R = g.kernel[1], S = columns;
    const double width = double(pixels());
    double best = -1;
    TileShape chosen{1, 1, 1, 1};
    const auto tiles = [](int64_t all, int some) { return double((all + some - 1) / some); };
    for (int k = 1; k <= Kind::most_parts; ++k)
      for (int c = 1; c <= Kind::most_lines; ++c)
        for (int r = 1; c * r <= Kind::most_lines; ++r)
          for (int s = 1; s <= widest_s; ++s) {
            if (k * c * r * s > Kind::most_sums || k > K || c > C || r > R || s > S) continue;
            // Border rows are visited once for each of r: a small price on each.
            const double loads = k + c * r * s, products = k * c * r * s, borders = r > 1 ? 1.02 + 0.01 * r : 1;
            const double step = (products > loads ? products : loads) + 0.5;
            const double row = ((step < Kind::latency ? Kind::latency : step) * width + 16) * borders;
            const double cost = tiles(K, k) * tiles(C, c) * tiles(R, r) * tiles(S, s) * row;
            if (best < 0 || cost < best) best = cost, chosen = {k, c, r, s};
          }
    return chosen;
  }

  void run() {
    const int64_t R = g.kernel[1], S = columns, K = job.out_parts, C = job.in_parts;
    const auto some = [](int64_t left, int most) { return left < most ? int(left) : most; };
    TileShape most{1, 1, 1, 1};
    if (job.dy_finite && job.shape && job.shape[0]) most = {job.shape[0], job.shape[1], job.shape[2], job.shape[3]};
    else if (job.dy_finite) most = choose_tile();
    if (job.dy_finite && job.shape)
      job.shape[0] = most.k, job.shape[1] = most.c, job.shape[2] = most.r, job.shape[3] = most.s;
    for (int64_t k = 0; k < K; k += most.k)
      for (int64_t c = 0; c < C; c += most.c)
        for (int64_t t = 0; t < g.kernel[0]; ++t)
          for (int64_t r = 0; r < R; r += most.r)
            for (int64_t s = 0; s < S; s += most.s) {
              const TileShape n{some(K - k, most.k), some(C - c, most.c), some(R - r, most.r), some(S - s, most.s)};
              if (job.dy_finite) taps(n, k, c, t, r, s);
              else careful_tap(k, c, t, r, s);
            }
  }
};

}  // namespace
}  // namespace convgrad::CONVGRAD_ISA
#endif
