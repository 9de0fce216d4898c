// Tiles, blocks and slices of the weight gradient: a small search with a cost model.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "dense_weight.h"

namespace convgrad {
namespace {

// Shares of L2 for the box and for dy. NOTE: constants, see dense_blocking.cpp.
constexpr int64_t box_budget = 224 << 10, dy_budget = 256 << 10;
constexpr int64_t tasks_wanted = 16;
constexpr int64_t partial_budget = 64 << 20;

// Cycles, measured on Zen 4: per element packed, per element of sums loaded and stored, per call and per batch entry.
constexpr double copy_cycles = 0.2, transpose_cycles = 0.5, sums_cycles = 0.12, far_sums_cycles = 0.35;
constexpr double call_cycles = 40, entry_cycles = 12, line_cycles = 20;

std::vector<int64_t> cuts(int64_t extent, int64_t smallest) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= extent; n += n < 16 ? 1 : n / 4) {
    const int64_t size = ceil_div(extent, n);
    if (size < smallest && n > 1) break;
    if (sizes.empty() || sizes.back() != size) sizes.push_back(size);
  }
  return sizes;
}

// Even blocks of channels: all, then halves and so on down to `smallest`, rounded up to `multiple`.
std::vector<int64_t> channel_blocks(int64_t channels, int64_t multiple, int64_t smallest) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1;; n *= 2) {
    const int64_t size = round_up(ceil_div(channels, n), multiple);
    if (n > 1 && (size < smallest || size >= sizes.back())) return sizes;
    sizes.push_back(size);
  }
}

}  // namespace

WeightGradient::WeightGradient(const Problem& asked, const Gemm* kernel) : problem(asked), gemm(kernel) {
  for (int axis = 0; axis < 3; ++axis)
    for (int64_t k = 0; k < problem.geo.kernel[axis]; ++k)
      offsets[axis].push_back(k * problem.geo.dilation[axis] - problem.geo.pad[axis]);
}

double WeightGradient::choose_blocking(int64_t element_bytes, int64_t limit, int64_t& minimum) {
  const Geometry& geo = problem.geo;
  const bool x_last = std::abs(problem.x_nominal[axis_c]) < std::abs(problem.x_nominal[axis_w]);
  const bool y_last = std::abs(problem.y_nominal[axis_c]) < std::abs(problem.y_nominal[axis_w]);
  const int64_t sum_bytes = element_bytes == 8 ? 8 : 4, taps = geo.taps(), multiple = gemm->k_multiple;
  const double flop = 2.0 / gemm->flops_cycle;
  const int64_t bias = problem.wrt & wrt_bias ? geo.K * 8 : 0;
  double best = -1;
  minimum = INT64_MAX;
  auto unit_rows = [&](int64_t rows) { return gemm->max_rows == 32 ? double(round_up(rows, 16)) : double(rows) + 0.7; };

  for (int64_t w : cuts(geo.out[2], 24)) {
    const AxisLayout axis_w = layout_axis(geo.stride[2], offsets[2], w);
    for (int64_t h : cuts(geo.out[1], 1)) {
      const AxisLayout axis_h = layout_axis(geo.stride[1], offsets[1], h);
      for (int64_t d : cuts(geo.out[0], 1)) {
        const BoxLayout layout(layout_axis(geo.stride[0], offsets[0], d), axis_h, axis_w, std::min<int64_t>(multiple, 2));
        const int64_t positions = layout.positions();
        const int64_t by_rows = h * round_up(w, multiple), by_plane = round_up(h * layout.pitch, multiple);
        const double rows_cost = double(by_rows) + double(h) * entry_cycles / 28, plane_cost = double(by_plane) + entry_cycles / 28;
        const bool joined = plane_cost < rows_cost;
        const int64_t dy_rows = round_up(by_rows, multiple);
        const int64_t dy_room = d * std::max(dy_rows, joined ? by_plane : 0);
        const int64_t box_room = std::max(positions, d * h * round_up(w, multiple));
        const bool whole = w == geo.out[2] && h == geo.out[1] && d == geo.out[0];
        for (int64_t joined_images = 1; joined_images <= (whole ? std::min<int64_t>(geo.N, 16) : 1); joined_images *= 2)
          for (int64_t in : channel_blocks(geo.group_in(), 1, 48))
            for (int64_t out : channel_blocks(geo.group_out(), gemm->cols, 64)) {
              const int64_t out_pad = round_up(out, gemm->cols);
              const int64_t box_size = round_up(in * row_pitch(round_up(joined_images * box_room, 2), element_bytes) * element_bytes + in * 64 +
                                                2 * (multiple + layout.pitch) * element_bytes, 64);
              const int64_t dy_size = round_up(joined_images * dy_room * out_pad * element_bytes, 64);
              const int64_t sums = round_up(taps * in * out_pad * sum_bytes, 64);
              const int64_t in_count = ceil_div(geo.group_in(), in), out_count = ceil_div(geo.group_out(), out);
              const int64_t block_count = geo.G * in_count * out_count;
              const int64_t chunk_count = ceil_div(geo.N, joined_images) * ceil_div(geo.out[0], d) *
                                          ceil_div(geo.out[1], h) * ceil_div(geo.out[2], w);
              int64_t cut = std::clamp(ceil_div(tasks_wanted, block_count), int64_t(1), chunk_count);
              while (cut > 1 && block_count * cut * sums > std::min(partial_budget, limit)) cut = cut / 2;
              const int64_t partial = cut > 1 ? block_count * cut * sums : 0;
              const int64_t bytes = partial + cut * bias + box_size + dy_size + (cut > 1 ? 0 : sums) + 4096;
              minimum = std::min(minimum, box_size + dy_size + sums + bias + 4096);
              if (bytes > limit) continue;

              const double columns = double(gemm->run_half ? round_up(out, gemm->cols / 2) : out_pad);
              const int64_t panels = ceil_div(in, gemm->max_rows), row_count = ceil_div(in, panels);
              const double rows = double(panels) * unit_rows(row_count);
              const double length = std::min(rows_cost, plane_cost) * double(d * joined_images);
              double cycles = length * rows * columns * double(taps) * flop;
              cycles += double(panels * ceil_div(out, gemm->cols) * taps) * call_cycles;
              cycles += double(joined_images * positions * in) * (x_last ? transpose_cycles : copy_cycles);
              cycles += double(joined_images * d * h * w * out) * (y_last ? copy_cycles : transpose_cycles);
              cycles += double(joined_images * positions) * line_cycles * (x_last ? 1 : double(in) / double(layout.pitch));
              cycles += double(joined_images * d * h * w) * line_cycles * (y_last ? double(ceil_div(out, gemm->cols)) : double(out) / double(w));
              cycles += double(taps * in) * columns * (sums > (512 << 10) ? far_sums_cycles : sums_cycles);
              if (box_size > box_budget || dy_size > dy_budget)
                cycles *= 1.0 + 0.15 * (double(box_size) / double(box_budget) + double(dy_size) / double(dy_budget));
              cycles *= double(block_count * chunk_count);
              cycles += double(partial / sum_bytes) * 0.5;
              const double tasks = double(block_count * cut);
              cycles *= std::ceil(tasks / 4) * 4 / tasks * 0.25 + 0.75;
              if (best < 0 || cycles < best) {
                best = cycles;
                const int64_t sizes[3] = {d, h, w};
                for (int axis = 0; axis < 3; ++axis) {
                  tile[axis] = sizes[axis];
                  tiles[axis] = ceil_div(geo.out[axis], sizes[axis]);
                }
                images = joined_images;
                box = layout;
                joined_rows = joined;
                in_block = in;
                in_blocks = in_count;
                row_panel = row_count;
                out_block = out;
                out_blocks = out_count;
                slices = cut;
                chunks = chunk_count;
                box_bytes = box_size;
                dy_bytes = dy_size;
                sums_bytes = sums;
                partial_bytes = partial;
                bias_bytes = round_up(cut * bias, 64);
                slot_bytes = box_size + dy_size + (cut > 1 ? 0 : sums);
              }
            }
      }
    }
  }
  return best;
}

std::string WeightGradient::describe() const {
  char text[400];
  std::snprintf(text, sizeof text,
                "tile %lldx%lldx%lld pixels x %lld images (%lld chunks in %lld slices), %s; box %lld positions x %lld of "
                "%lld channels, %lld of %lld result channels; %lld blocks",
                (long long)tile[0], (long long)tile[1], (long long)tile[2], (long long)images, (long long)chunks,
                (long long)slices, joined_rows ? "rows joined" : "row by row", (long long)box.positions(),
                (long long)in_block, (long long)problem.geo.group_in(), (long long)out_block,
                (long long)problem.geo.group_out(), (long long)blocks());
  return text;
}

}  // namespace convgrad
