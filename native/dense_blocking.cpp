// Which taps, phases, tiles and blocks a correlation has: geometry first, then a small search with a cost model.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "dense_correlate.h"

namespace convgrad {
namespace {

// The part of L2 that a packed box may take: a third of the smallest L2 this was tuned for (1 MiB, Zen 4), because the
// next tile's pixels arrive while this one is multiplied.
// NOTE: a constant, not the machine's cache size: it decides the order of sums, which must not differ by machine.
constexpr int64_t box_budget = 320 << 10;
constexpr int64_t sums_budget = 512 << 10;
constexpr int64_t tasks_wanted = 16;  // enough to share among a few threads

// Cycles per element, measured on Zen 4: copying lines, transposing them, storing along a line, storing scattered.
constexpr double copy_cycles = 0.2, transpose_cycles = 0.5, store_cycles = 0.15, scatter_cycles = 1.0;
constexpr double line_cycles = 20;  // for starting a line
constexpr double call_cycles = 40, tap_cycles = 8, sums_cycles = 0.1;

AxisPhase all_pixels(int64_t count, size_t taps) {
  AxisPhase phase{0, 1, count, {}};
  for (size_t tap = 0; tap < taps; ++tap) phase.taps.push_back(int(tap));
  return phase;
}

// Even cuts of an extent: ceil(extent / n) for n = 1, 2, 3, …
std::vector<int64_t> cuts(int64_t extent, int64_t smallest) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= extent; n += n < 16 ? 1 : n / 4) {
    const int64_t size = ceil_div(extent, n);
    if (size < smallest && n > 1) break;
    if (sizes.empty() || sizes.back() != size) sizes.push_back(size);
  }
  return sizes;
}

}  // namespace

Correlation::Correlation(const Problem& asked, const Gemm* kernel) : problem(asked), gemm(kernel) {
  const Geometry& geo = problem.geo;
  const bool forward = problem.wrt & wrt_output;
  reduced = forward ? geo.group_in() : geo.group_out();
  results = forward ? geo.group_out() : geo.group_in();
  zeros_first = reduced == 0;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t stride = geo.stride[axis], dilation = geo.dilation[axis], pad = geo.pad[axis];
    source_size[axis] = forward ? geo.in[axis] : geo.out[axis];
    AxisTaps& axis_taps = taps[axis];
    if (forward) {
      axis_taps.step = stride;
      for (int64_t k = 0; k < geo.kernel[axis]; ++k) {
        axis_taps.kernel_index.push_back(k);
        axis_taps.offset.push_back(k * dilation - pad);
      }
      axis_phases[axis].push_back(all_pixels(geo.out[axis], axis_taps.offset.size()));
    } else {
      // Input i = first + j*stride meets tap k at output j + (first + pad - k*dilation)/stride.
      std::vector<std::vector<int>> taps_of;
      std::vector<int64_t> residues;
      for (int64_t k = 0; k < geo.kernel[axis]; ++k) {
        const int64_t at = k * dilation - pad, first = at - floor_div(at, stride) * stride;
        const auto found = std::find(residues.begin(), residues.end(), first);
        if (found == residues.end()) {
          residues.push_back(first);
          taps_of.push_back({});
        }
        taps_of[size_t(std::find(residues.begin(), residues.end(), first) - residues.begin())].push_back(int(k));
        axis_taps.kernel_index.push_back(k);
        axis_taps.offset.push_back((first - at) / stride);
      }
      std::vector<size_t> order(residues.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return residues[a] < residues[b]; });
      for (size_t i : order)
        if (residues[i] < geo.in[axis])
          axis_phases[axis].push_back(
              {residues[i], stride, ceil_div(geo.in[axis] - residues[i], stride), taps_of[i]});
      if (int64_t(axis_phases[axis].size()) < std::min(stride, geo.in[axis])) zeros_first = true;
    }
    extent[axis] = 0;
    for (const AxisPhase& phase : axis_phases[axis]) extent[axis] = std::max(extent[axis], phase.count);
  }
  tap_total = 0;
  if (reduced > 0 && results > 0)
    for (const AxisPhase& d : axis_phases[0])
      for (const AxisPhase& h : axis_phases[1])
        for (const AxisPhase& w : axis_phases[2]) {
          const int64_t count = int64_t(d.taps.size() * h.taps.size() * w.taps.size());
          phases.push_back({{&d, &h, &w}, count, tap_total});
          tap_total += count;
        }
}

double Correlation::choose_blocking(int64_t element_bytes, int64_t limit, int64_t& minimum) {
  const Geometry& geo = problem.geo;
  const bool forward = problem.wrt & wrt_output;
  const Strides& from = forward ? problem.x_nominal : problem.y_nominal;
  const Strides& to = forward ? problem.y_nominal : problem.x_nominal;
  const bool from_last = std::abs(from[axis_c]) < std::abs(from[axis_w]);
  const bool to_last = std::abs(to[axis_c]) < std::abs(to[axis_w]);
  const int64_t sum_bytes = element_bytes == 8 ? 8 : 4, multiple = std::max<int64_t>(gemm->k_multiple, 16);
  double best = -1;
  minimum = INT64_MAX;
  struct Choice {
    bool rows;
    int64_t tile[3], block, panel, panels_block;
    BoxLayout box;
    int64_t strips;
  } chosen{};

  for (bool rows : {true, false}) {
    const int64_t most = rows ? gemm->max_rows : gemm->cols;
    const int64_t unit = rows ? (most == 32 ? 16 : 1) : gemm->run_half ? most / 2 : most;
    const int64_t widest = rows ? gemm->cols : gemm->max_rows;
    const int64_t panel_count = ceil_div(std::max<int64_t>(results, 1), widest);
    const int64_t width = rows ? gemm->cols : ceil_div(std::max<int64_t>(results, 1), panel_count);
    const double columns = rows ? double(round_up(results, gemm->run_half ? widest / 2 : widest))
                                : double(width * panel_count) + 0.7 * double(panel_count);
    const double flop = 2.0 / gemm->flops_cycle;
    for (int64_t w : cuts(extent[2], 24)) {
      const AxisLayout axis_w = layout_axis(taps[2].step, taps[2].offset, w);
      for (int64_t h : cuts(extent[1], 1)) {
        const AxisLayout axis_h = layout_axis(taps[1].step, taps[1].offset, h);
        for (int64_t d : cuts(extent[0], 1)) {
          const BoxLayout layout(layout_axis(taps[0].step, taps[0].offset, d), axis_h, axis_w, rows ? 1 : 1);
          const int64_t positions = layout.positions();
          int64_t block = std::min(padded(reduced), box_budget / (positions * element_bytes) / multiple * multiple);
          block = std::max(block, std::min(padded(reduced), multiple));
          const int64_t count = ceil_div(reduced, block);
          block = std::min(padded(reduced), round_up(ceil_div(reduced, count), multiple));
          const int64_t box = positions * row_pitch(block, element_bytes) * element_bytes;
          const int64_t joined = (h - 1) * layout.pitch + w;
          const int64_t most_segments = std::min<int64_t>(w, 2 * int64_t(taps[2].offset.size()) + 1);
          const int64_t strips = std::max(ceil_div(joined, most), h * (ceil_div(w, most) + most_segments)) * d;
          const int64_t tile_sums = int64_t(gemm->max_rows) * gemm->cols * sum_bytes;
          int64_t share = panel_count;
          if (count > 1) share = std::clamp(sums_budget / (strips * int64_t(phases.size()) * tile_sums), int64_t(1), share);
          const int64_t tiles_all = ceil_div(extent[0], d) * ceil_div(extent[1], h) * ceil_div(extent[2], w);
          const int64_t tasks_now = geo.N * geo.G * tiles_all;
          share = std::min(share, std::max<int64_t>(1, panel_count / std::max<int64_t>(1, ceil_div(tasks_wanted, tasks_now))));
          const int64_t block_count = ceil_div(panel_count, share);
          const int64_t sums = count > 1 ? (1 + strips * share * int64_t(phases.size())) * tile_sums : tile_sums;
          const int64_t bytes =
              box + sums + tap_total * panel_count * width * geo.G * (round_up(reduced, multiple) + count * 32) * element_bytes;
          minimum = std::min(minimum, bytes + 4096);
          if (bytes + 4096 > limit) continue;

          auto cost = [&](int64_t n) { return double(round_up(n, unit)) + 0.5 * double(ceil_div(n, most) * unit); };
          const double pixels = std::min(cost(joined), double(h) * cost(w)) * double(d);
          double cycles = pixels * columns * double(padded(reduced)) * double(tap_total) * flop;
          cycles += double(strips * panel_count * count) * (call_cycles * double(phases.size()) + tap_cycles * double(tap_total));
          cycles += double(positions * reduced * block_count) * (from_last == rows ? copy_cycles : transpose_cycles);
          cycles += double(positions * block_count) * line_cycles * (from_last ? 1 : double(reduced) / double(layout.pitch));
          cycles += double(h * w * d * results) * double(phases.size()) *
                    (to_last == rows && (rows || taps[2].step > 0) && (rows || forward || geo.stride[2] == 1)
                         ? store_cycles : scatter_cycles);
          cycles += double(count - 1) * pixels * columns * sums_cycles;
          cycles += double(tap_total * reduced * results * element_bytes) / 16.0;  // the weight, from L2 or beyond
          if (box > box_budget) cycles *= 1.0 + double(box) / double(box_budget) * 0.1;
          const double tasks_all = double(tasks_now * block_count);
          cycles *= double(tasks_now) * (std::ceil(tasks_all / 4) * 4 / std::max(tasks_all, 1.0) * 0.25 + 0.75);
          if (best < 0 || cycles < best) {
            best = cycles;
            chosen = {rows, {d, h, w}, block, width, share, layout, strips};
          }
        }
      }
    }
  }
  if (best < 0) return -1;
  pixels_are_rows = chosen.rows;
  for (int axis = 0; axis < 3; ++axis) {
    tile[axis] = chosen.tile[axis];
    tiles[axis] = ceil_div(extent[axis], tile[axis]);
  }
  box = chosen.box;
  channel_block = chosen.block;
  channel_blocks = ceil_div(reduced, channel_block);
  const auto spaced = [&](int64_t pad) { return pixels_are_rows ? pad : row_pitch(pad, element_bytes); };
  channel_pad = (channel_blocks - 1) * spaced(channel_block) + spaced(padded(reduced - (channel_blocks - 1) * channel_block));
  panel = chosen.panel;
  panels = ceil_div(results, panel);
  panels_block = chosen.panels_block;
  blocks = ceil_div(panels, panels_block);
  const int64_t tile_sums = int64_t(gemm->max_rows) * gemm->cols * sum_bytes;
  weight_bytes = round_up(geo.G * channel_pad * tap_total * panels * panel * element_bytes, 64) + 256;
  box_bytes = round_up(box.positions() * row_pitch(channel_block, element_bytes) * element_bytes + gemm->cols * 2 * element_bytes, 64);
  sums_bytes = channel_blocks > 1 ? (1 + chosen.strips * panels_block * int64_t(phases.size())) * tile_sums : tile_sums;
  slot_bytes = box_bytes + sums_bytes;
  weight_bytes = round_up(weight_bytes, 64);
  return best + double(geo.G * reduced * results * tap_total) * 1.5;
}

std::string Correlation::describe() const {
  char text[400];
  std::snprintf(text, sizeof text,
                "%s; %zu phase%s, %lld taps; tile %lldx%lldx%lld pixels (%lld tiles), box %lld positions x %lld of %lld "
                "channels, %lld panels of %lld result channels in %lld blocks; %lld tasks",
                pixels_are_rows ? "pixels are rows" : "pixels are columns", phases.size(), phases.size() == 1 ? "" : "s",
                (long long)tap_total, (long long)tile[0], (long long)tile[1], (long long)tile[2],
                (long long)(tiles[0] * tiles[1] * tiles[2]), (long long)box.positions(), (long long)channel_block,
                (long long)reduced, (long long)panels, (long long)panel, (long long)blocks, (long long)tasks());
  return text;
}

}  // namespace convgrad
