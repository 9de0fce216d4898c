// Tiles, blocks and slices of the paired weight gradient: a small search with a cost model.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "dense_paired.h"

namespace convgrad {
namespace {

// What a task keeps in L2: packed operands and sums. Processors with AMX have 2 MiB, for two threads of execution.
constexpr int64_t near_bytes = 900 << 10;
constexpr int64_t partial_budget = 64 << 20;
constexpr int64_t tasks_wanted = 16;
constexpr int64_t most_together = 256;  // channels of groups that are packed side by side

// Cycles on a processor with AMX: one step of 2 x 2 tiles, a call with its sums, an element of dy and of x packed, a
// row started, an element of sums added to another slice's.
constexpr double step_cycles = 68, call_cycles = 150, dy_cycles = 0.45, x_cycles = 0.45, shift_cycles = 0.12;
constexpr double row_cycles = 60, slice_cycles = 0.5;

// Even blocks of channels in whole tiles.
std::vector<int64_t> channel_blocks(int64_t channels) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= ceil_div(channels, 32); ++n) {
    const int64_t size = round_up(ceil_div(channels, n), 32);
    if (sizes.empty() || size < sizes.back()) sizes.push_back(size);
    if (size <= 64) break;
  }
  return sizes;
}

}  // namespace

PairedGradient::PairedGradient(const Problem& asked, const Gemm* kernel) : problem(asked), gemm(kernel) {
  for (int axis = 0; axis < 3; ++axis)
    for (int64_t k = 0; k < problem.geo.kernel[axis]; ++k)
      offsets[axis].push_back(k * problem.geo.dilation[axis] - problem.geo.pad[axis]);
}

// What follows from a tile, blocks of channels and slices; false if it does not fit in `limit` bytes.
bool PairedGradient::lay_out(int64_t limit) {
  const Geometry& geo = problem.geo;
  const int64_t h = tile[1], w = tile[2], k = gemm->k_multiple;
  const int64_t by_rows = h * round_up(w, k), by_plane = round_up(h * box.pitch, k);
  joined_rows = by_plane < by_rows;
  row_pitch = joined_rows ? box.pitch : round_up(w, k);
  entry = joined_rows ? by_plane : row_pitch;
  dy_pitch = convgrad::row_pitch(entries(images, tile[0], h) * entry, 2);
  // A call may read past the box by the gap behind a row, or behind a plane a tap's distance along a row later.
  copy_elements = (images * box.positions() + 2 * k + (joined_rows ? box.pitch : 0)) * box_columns();
  in_blocks = ceil_div(geo.group_in(), in_block);
  out_blocks = groups > 1 ? 1 : ceil_div(geo.group_out(), out_block);
  dy_plane = round_up(out_block * dy_pitch * 2 + 64, 64);
  box_plane = round_up(copies * copy_elements * 2, 64);
  sums_bytes = round_up(geo.taps() * out_block * columns() * 4, 64);
  chunks = ceil_div(geo.N, images);
  for (int axis = 0; axis < 3; ++axis) {
    tiles[axis] = ceil_div(geo.out[axis], tile[axis]);
    chunks *= tiles[axis];
  }
  if (slices == 0) {
    slices = std::clamp(ceil_div(tasks_wanted, blocks()), int64_t(1), chunks);
    while (slices > 1 && blocks() * slices * sums_bytes > std::min(partial_budget, limit / 2)) slices /= 2;
  }
  partial_bytes = slices > 1 ? blocks() * slices * sums_bytes : 0;
  bias_bytes = problem.wrt & wrt_bias ? round_up(slices * geo.K * 8, 64) : 0;
  slot_bytes = gemm->parts * (dy_plane + box_plane) + (slices > 1 ? 0 : sums_bytes);
  return partial_bytes + bias_bytes + slot_bytes <= limit;
}

// Estimated cycles of all cores together when so many of them share the tasks.
double PairedGradient::cycles(double cores) const {
  const Geometry& geo = problem.geo;
  const double products = gemm->parts == 1 ? 1 : gemm->parts == 2 ? 4 : 6, taps = double(geo.taps());
  const int64_t entry_count = entries(images, tile[0], tile[1]), positions = images * box.positions();
  const double steps = double(entry_count * entry / gemm->k_multiple);
  const int64_t joined = std::max<int64_t>(1, gemm->near_k / entry);
  const double calls = double(ceil_div(entry, piece()) * ceil_div(entry_count, joined));
  const int64_t in = groups > 1 ? geo.group_in() : in_block, out = out_block / groups;
  const double tile_pairs = double(groups) * double(round_up(out, 16)) / 32 * double(round_up(in, 16)) / 32;
  double chunk = taps * tile_pairs * (steps * step_cycles * products + calls * call_cycles);
  chunk += gemm->parts * double(entry_count * entry * out_block) * dy_cycles;
  chunk += gemm->parts * double(positions * box_columns()) * (x_cycles + double(copies - 1) * shift_cycles);
  chunk += row_cycles * double(positions / box.pitch + images * tile[0] * tile[1]);
  const int64_t kept = gemm->parts * (dy_plane + box_plane) + sums_bytes;
  if (kept > near_bytes) chunk *= 1 + 0.3 * double(kept - near_bytes) / double(near_bytes);
  const double tasks = double(blocks() * slices), uneven = std::ceil(tasks / cores) * cores / tasks;
  return (chunk * double(blocks() * chunks) + slice_cycles * double(partial_bytes / 4)) * (0.75 + 0.25 * uneven);
}

double PairedGradient::choose_blocking(int64_t limit) {
  const Geometry& geo = problem.geo;
  const std::vector<int64_t> ins = channel_blocks(geo.group_in()), outs = channel_blocks(geo.group_out());
  double best = -1;
  const auto consider = [&](PairedGradient p, int64_t in, int64_t out, int64_t groups, double cores) {
    p.in_block = in;
    p.out_block = out;
    p.groups = groups;
    if (!p.lay_out(limit)) return;
    const double estimate = p.cycles(cores);
    if (best >= 0 && estimate >= best) return;
    best = estimate;
    *this = p;
  };

  const auto consider_channels = [&](const PairedGradient& p, double cores) {
    for (int64_t in : ins)
      for (int64_t out : outs) consider(p, in, out, 1, cores);
    // Several groups, where each one's columns lie inside of a panel.
    if (geo.group_in() % gemm->cols == 0 || 2 * geo.group_in() == gemm->cols)
      for (int64_t groups = 2; groups <= geo.G && groups * geo.group_in() <= most_together; groups *= 2)
        consider(p, round_up(geo.group_in(), gemm->cols), groups * geo.group_out(), groups, cores);
  };

  PairedGradient p = *this;
  for (int64_t w : cuts(geo.out[2], 24, offsets[2].size())) {
    const AxisLayout axis_w = layout_axis(geo.stride[2], offsets[2], w);
    for (int64_t h : cuts(geo.out[1], 1, offsets[1].size())) {
      const AxisLayout axis_h = layout_axis(geo.stride[1], offsets[1], h);
      for (int64_t d : cuts(geo.out[0], 1, offsets[0].size())) {
        p.tile[0] = d;
        p.tile[1] = h;
        p.tile[2] = w;
        p.box = BoxLayout(layout_axis(geo.stride[0], offsets[0], d), axis_h, axis_w, 2);
        p.copies = 1;
        for (int64_t tw = 0; tw < geo.kernel[2]; ++tw)
          if (p.box.tap_position(0, 0, tw) % 2) p.copies = 2;
        const bool whole = w == geo.out[2] && h == geo.out[1] && d == geo.out[0];
        for (p.images = 1; p.images <= (whole ? std::min<int64_t>(geo.N, 16) : 1); p.images *= 2)
          consider_channels(p, 4);
      }
    }
  }
  if (best < 0) return best;
  // Tiles and slices decide the order of sums and must not depend on the threads. Blocks of channels do not: with fewer
  // threads they may be larger, so that activations are packed less often.
  best = -1;
  p = *this;
  consider_channels(p, std::max(problem.threads, 1));
  return best;
}

std::string PairedGradient::describe() const {
  char text[400];
  std::snprintf(text, sizeof text,
                "tile %lldx%lldx%lld pixels x %lld images (%lld chunks in %lld slices), %s, %lld cop%s of x; "
                "%lld of %lld channels, %lld of %lld result channels, %lld group%s; %lld blocks",
                (long long)tile[0], (long long)tile[1], (long long)tile[2], (long long)images, (long long)chunks,
                (long long)slices, joined_rows ? "rows joined" : "row by row", (long long)copies,
                copies == 1 ? "y" : "ies", (long long)in_block, (long long)problem.geo.group_in(),
                (long long)(out_block / groups), (long long)problem.geo.group_out(), (long long)groups,
                groups == 1 ? "" : "s", (long long)blocks());
  return text;
}

}  // namespace convgrad
