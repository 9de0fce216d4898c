// Tiles, blocks and slices of the weight gradient: a small search with a cost model.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "dense_weight.h"

namespace convgrad {
namespace {

// Shares of L2 for the box and for dy. NOTE: constants, see dense_blocking.cpp.
constexpr int64_t box_budget = 400 << 10, dy_budget = 320 << 10;
constexpr int64_t tasks_wanted = 16, most_chunks = 256;  // of a slice: their sums are added one after the other
constexpr int64_t partial_budget = 64 << 20;

// Cycles, measured on Zen 4: per element packed, per element of sums loaded and stored, per call and per batch entry.
constexpr double copy_cycles = 0.2, transpose_cycles = 0.5, sums_cycles = 0.12, far_sums_cycles = 0.35;
constexpr double memory_cycles = 1.5, store_cycles = 0.5, far_store_cycles = 1.0;
constexpr double call_cycles = 40, entry_cycles = 12, line_cycles = 20;

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

namespace {

// One candidate: a tile, images joined, blocks of channels, and what follows from them.
struct Choice {
  int64_t tile[3] = {};
  BoxLayout box;
  int64_t images = 1, in = 0, out = 0;
  bool joined = false;               // the rows of a plane are summed without a break
  double plane_rows = 0;             // length of the sums over one plane
  int64_t in_blocks = 0, out_blocks = 0, blocks = 0, chunks = 0, slices = 1;
  int64_t box_bytes = 0, dy_bytes = 0, sums_bytes = 0, partial_bytes = 0;
};

class Search {
 public:
  Search(const WeightGradient& gradient, int64_t element_bytes, int64_t limit)
      : g_(gradient), geo_(gradient.problem.geo), gemm_(*gradient.gemm), bytes_(element_bytes), limit_(limit),
        sum_bytes_(element_bytes == 8 ? 8 : 4) {
    x_last_ = std::abs(g_.problem.x_nominal[axis_c]) < std::abs(g_.problem.x_nominal[axis_w]);
    y_last_ = std::abs(g_.problem.y_nominal[axis_c]) < std::abs(g_.problem.y_nominal[axis_w]);
  }

  // What depends on the tile alone.
  Choice with_tile(int64_t d, int64_t h, int64_t w, BoxLayout layout) const {
    Choice choice;
    choice.tile[0] = d;
    choice.tile[1] = h;
    choice.tile[2] = w;
    choice.box = std::move(layout);
    const int64_t by_rows = h * round_up(w, gemm_.k_multiple);
    const int64_t by_plane = round_up(h * choice.box.pitch, gemm_.k_multiple);
    const double rows_cost = double(by_rows) + double(h) * entry_cycles / 28;
    const double plane_cost = double(by_plane) + entry_cycles / 28;
    choice.joined = plane_cost < rows_cost;
    choice.plane_rows = double(choice.joined ? by_plane : by_rows);
    return choice;
  }

  void set_blocks(Choice& choice, int64_t images, int64_t in, int64_t out) const {
    const int64_t d = choice.tile[0], h = choice.tile[1], w = choice.tile[2], multiple = gemm_.k_multiple;
    choice.images = images;
    choice.in = in;
    choice.out = out;
    choice.in_blocks = ceil_div(geo_.group_in(), in);
    choice.out_blocks = ceil_div(geo_.group_out(), out);
    choice.blocks = geo_.G * choice.in_blocks * choice.out_blocks;
    choice.chunks = ceil_div(geo_.N, images) * ceil_div(geo_.out[0], d) * ceil_div(geo_.out[1], h) *
                    ceil_div(geo_.out[2], w);
    // Room for the box and dy also as the careful way packs them: every row rounded up.
    const int64_t rows = round_up(h * round_up(w, multiple), multiple);
    const int64_t plane = choice.joined ? round_up(h * choice.box.pitch, multiple) : 0;
    const int64_t positions = std::max(choice.box.positions(), d * h * round_up(w, multiple));
    const int64_t pitch = row_pitch(round_up(images * positions, 2), bytes_);
    const int64_t slack = 2 * (multiple + choice.box.pitch) * bytes_;
    choice.box_bytes = gemm_.parts * round_up(in * pitch * bytes_ + in * 64 + slack, 64);
    choice.dy_bytes =
        gemm_.parts * round_up(images * d * std::max(rows, plane) * round_up(out, gemm_.cols) * bytes_, 64);
    choice.sums_bytes = round_up(geo_.taps() * in * round_up(out, gemm_.cols) * sum_bytes_, 64);
    // Slices of the reduction, so that there are enough tasks, as far as their partial sums find room.
    const int64_t wanted = std::max(ceil_div(tasks_wanted, choice.blocks), ceil_div(choice.chunks, most_chunks));
    choice.slices = std::clamp(wanted, int64_t(1), choice.chunks);
    const int64_t room = std::min(partial_budget, limit_);
    while (choice.slices > 1 && choice.blocks * choice.slices * choice.sums_bytes > room) choice.slices /= 2;
    choice.partial_bytes = choice.slices > 1 ? choice.blocks * choice.slices * choice.sums_bytes : 0;
  }

  int64_t bias_bytes(int64_t slices) const { return g_.problem.wrt & wrt_bias ? slices * geo_.K * 8 : 0; }
  int64_t slot_bytes(const Choice& choice) const {
    return choice.box_bytes + choice.dy_bytes + (choice.slices > 1 ? 0 : choice.sums_bytes);
  }
  // Bytes for one thread, and for one thread without slices.
  int64_t workspace(const Choice& choice) const {
    return choice.partial_bytes + bias_bytes(choice.slices) + slot_bytes(choice) + 4096;
  }
  int64_t least(const Choice& choice) const {
    return choice.box_bytes + choice.dy_bytes + choice.sums_bytes + bias_bytes(1) + 4096;
  }

  double cycles(const Choice& choice) const {
    const int64_t panels = ceil_div(choice.in, gemm_.max_rows), rows = ceil_div(choice.in, panels);
    const int64_t out_panels = ceil_div(choice.out, gemm_.cols);
    const double taps = double(geo_.taps()), images = double(choice.images), in = double(choice.in);
    const double out = double(choice.out), positions = images * double(choice.box.positions());
    const double pixels = images * double(choice.tile[0] * choice.tile[1] * choice.tile[2]);
    const double columns = double(round_up(choice.out, gemm_.run_half ? gemm_.cols / 2 : gemm_.cols));

    // The sums of a call: a step takes as long as its products, or as the step before it needs to finish.
    const double planes = double(choice.tile[0]) * images;
    const double entries = planes * double(choice.joined ? 1 : choice.tile[1]);
    const double call_rows = gemm_.max_rows == 32 ? double(round_up(rows, 16)) : double(rows) + 0.7;
    const auto call = [&](int64_t cols) {
      const double step = std::max(call_rows * double(cols) * 2.0 / gemm_.flops_cycle, gemm_.latency_cycles);
      return choice.plane_rows * planes * step + entries * entry_cycles + call_cycles;
    };
    const bool half = columns < double(out_panels * gemm_.cols);
    double chunk = double(out_panels - half) * call(gemm_.cols) + (half ? call(gemm_.cols / 2) : 0.0);
    chunk *= double(panels) * taps;
    chunk += positions * in * (x_last_ ? transpose_cycles : copy_cycles);
    chunk += pixels * out * (y_last_ ? copy_cycles : transpose_cycles);
    chunk += positions * line_cycles * (x_last_ ? 1.0 : in / double(choice.box.pitch));
    chunk += pixels * line_cycles * (y_last_ ? double(out_panels) : out / double(choice.tile[2]));
    const bool far = choice.sums_bytes > (512 << 10), farther = choice.sums_bytes > (4 << 20);
    chunk += taps * in * columns * (farther ? memory_cycles : far ? far_sums_cycles : sums_cycles);
    const double box_share = double(choice.box_bytes) / double(box_budget);
    const double dy_share = double(choice.dy_bytes) / double(dy_budget);
    if (box_share > 1 || dy_share > 1) chunk *= 1.0 + 0.15 * (box_share + dy_share);
    // Tasks that do not share out evenly among four threads wait for each other.
    const double tasks = double(choice.blocks * choice.slices), uneven = std::ceil(tasks / 4) * 4 / tasks;
    const double partial = double(choice.partial_bytes / sum_bytes_) * 1.0;
    const double store = taps * in * out * double(choice.blocks) * (far ? far_store_cycles : store_cycles);
    return (chunk * double(choice.blocks * choice.chunks) + partial + store) * (0.75 + 0.25 * uneven);
  }

 private:
  const WeightGradient& g_;
  const Geometry& geo_;
  const Gemm& gemm_;
  int64_t bytes_, limit_, sum_bytes_;
  bool x_last_, y_last_;
};

}  // namespace

double WeightGradient::choose_blocking(int64_t element_bytes, int64_t limit, int64_t& minimum) {
  const Geometry& geo = problem.geo;
  const Search search(*this, element_bytes, limit);
  const std::vector<int64_t> ins = channel_blocks(geo.group_in(), 1, 24);
  const std::vector<int64_t> outs = channel_blocks(geo.group_out(), gemm->cols, 64);
  double best = -1;
  Choice chosen;
  minimum = INT64_MAX;
  auto consider = [&](const Choice& choice) {
    minimum = std::min(minimum, search.least(choice));
    const double cycles = search.workspace(choice) > limit ? -1 : search.cycles(choice);
    if (cycles < 0 || (best >= 0 && cycles >= best)) return;
    best = cycles;
    chosen = choice;
  };
  for (int64_t w : cuts(geo.out[2], 24, offsets[2].size())) {
    const AxisLayout axis_w = layout_axis(geo.stride[2], offsets[2], w);
    for (int64_t h : cuts(geo.out[1], 1, offsets[1].size())) {
      const AxisLayout axis_h = layout_axis(geo.stride[1], offsets[1], h);
      for (int64_t d : cuts(geo.out[0], 1, offsets[0].size())) {
        const AxisLayout axis_d = layout_axis(geo.stride[0], offsets[0], d);
        Choice choice = search.with_tile(d, h, w, BoxLayout(axis_d, axis_h, axis_w, std::min(gemm->k_multiple, 2)));
        const bool whole = w == geo.out[2] && h == geo.out[1] && d == geo.out[0];
        for (int64_t joined = 1; joined <= (whole ? std::min<int64_t>(geo.N, 16) : 1); joined *= 2)
          for (int64_t in : ins)
            for (int64_t out : outs) {
              search.set_blocks(choice, joined, in, out);
              consider(choice);
            }
      }
    }
  }
  if (best < 0) return -1;
  for (int axis = 0; axis < 3; ++axis) {
    tile[axis] = chosen.tile[axis];
    tiles[axis] = ceil_div(geo.out[axis], tile[axis]);
  }
  images = chosen.images;
  box = chosen.box;
  joined_rows = chosen.joined;
  in_block = chosen.in;
  in_blocks = chosen.in_blocks;
  row_panel = ceil_div(in_block, ceil_div(in_block, gemm->max_rows));
  out_block = chosen.out;
  out_blocks = chosen.out_blocks;
  slices = chosen.slices;
  chunks = chosen.chunks;
  box_bytes = chosen.box_bytes;
  dy_bytes = chosen.dy_bytes;
  sums_bytes = chosen.sums_bytes;
  partial_bytes = chosen.partial_bytes;
  bias_bytes = round_up(search.bias_bytes(slices), 64);
  slot_bytes = search.slot_bytes(chosen);
  return best;
}

std::string WeightGradient::describe() const {
  char text[400];
  std::snprintf(text, sizeof text,
                "tile %lldx%lldx%lld pixels x %lld images (%lld chunks in %lld slices), %s; box %lld positions x "
                "%lld of %lld channels, %lld of %lld result channels; %lld blocks",
                (long long)tile[0], (long long)tile[1], (long long)tile[2], (long long)images, (long long)chunks,
                (long long)slices, joined_rows ? "rows joined" : "row by row", (long long)box.positions(),
                (long long)in_block, (long long)problem.geo.group_in(), (long long)out_block,
                (long long)problem.geo.group_out(), (long long)blocks());
  return text;
}

}  // namespace convgrad
