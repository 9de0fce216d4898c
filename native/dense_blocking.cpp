// Which taps, phases, tiles and blocks a correlation has: geometry first, then a small search with a cost model.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "dense_correlate.h"

namespace convgrad {
namespace {

// The part of L2 that a packed box may take: a third of the smallest L2 this was tuned for (1 MiB, Zen 4), because the
// next tile's pixels arrive while this one is multiplied.
// NOTE: a constant, not the machine's cache size: it decides the order of sums, which must not differ by machine.
constexpr int64_t box_budget = 352 << 10;
constexpr int64_t sums_budget = 512 << 10;
constexpr double quiet_bytes = 512 << 10;  // of L2: what arrives does not yet drive out what is in use
constexpr int64_t panel_budget = 256 << 10;  // of a panel of the weight, where L2 must feed tiles with it
constexpr int64_t own_panel_budget = 384 << 10;  // of a panel that a task packs for itself
constexpr int64_t panels_budget = 768 << 10;  // of all panels of a task, where L2 must feed tiles with all of them
constexpr int64_t near_weight = 1 << 20;  // of the weight: stays in L2 of a processor with tiles
constexpr int64_t tasks_wanted = 16;  // enough to share among a few threads

// Cycles per element, measured on Zen 4: copying lines, transposing them, storing along a line, storing scattered.
constexpr double copy_cycles = 0.2, transpose_cycles = 0.5, store_cycles = 0.15, scatter_cycles = 1.0;
constexpr double line_cycles = 20;  // for starting a line
constexpr double call_cycles = 40, tap_cycles = 8, sums_cycles = 0.1;
constexpr double weight_cycles = 1.5, own_weight_cycles = 0.8;  // packing an element of the weight

AxisPhase all_pixels(int64_t count, size_t taps) {
  AxisPhase phase{0, 1, count, {}};
  for (size_t tap = 0; tap < taps; ++tap) phase.taps.push_back(int(tap));
  return phase;
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
      std::map<int64_t, std::vector<int>> taps_of;  // a residue of the stride
      for (int64_t k = 0; k < geo.kernel[axis]; ++k) {
        const int64_t at = k * dilation - pad, first = at - floor_div(at, stride) * stride;
        taps_of[first].push_back(int(k));
        axis_taps.kernel_index.push_back(k);
        axis_taps.offset.push_back((first - at) / stride);
      }
      for (const auto& [residue, list] : taps_of)
        if (residue < geo.in[axis])
          axis_phases[axis].push_back({residue, stride, ceil_div(geo.in[axis] - residue, stride), list});
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

bool Correlation::taps_lie_apart() const {
  for (const Phase& phase : phases)
    for (int axis = 0; axis < 3; ++axis) {
      const AxisPhase& all = *phase.axis[axis];
      if (int64_t(all.taps.size()) > taps[axis].step) return false;
      for (int tap : all.taps) {
        const Range pixels =
            landing(0, all.count, taps[axis].step, taps[axis].offset[size_t(tap)], source_size[axis]);
        if (pixels.first > 0 || pixels.last < all.count) return false;
      }
    }
  return true;
}

namespace {

// One candidate: an orientation with a tile, and what follows from them.
struct Choice {
  bool rows = true;  // pixels are rows of A
  int64_t tile[3] = {};
  BoxLayout box;
  int64_t block = 0, count = 0;                   // summed channels of a block, blocks
  int64_t panel = 0, panels = 0, share = 0;       // result channels of a panel, panels, panels of a task
  int64_t strips = 0, tasks = 0, box_bytes = 0, sums_bytes = 0;
  int64_t own_panels = 0;                         // see Correlation
  int64_t most = 0, unit = 0;                     // pixels of a strip at most, and their grain
};

class Search {
 public:
  Search(const Correlation& correlation, int64_t element_bytes)
      : c_(correlation), geo_(correlation.problem.geo), gemm_(*correlation.gemm), bytes_(element_bytes),
        phases_(int64_t(correlation.phases.size())) {
    const bool forward = c_.problem.wrt & wrt_output;
    const Strides& from = forward ? c_.problem.x_nominal : c_.problem.y_nominal;
    const Strides& to = forward ? c_.problem.y_nominal : c_.problem.x_nominal;
    from_last_ = std::abs(from[axis_c]) < std::abs(from[axis_w]);
    to_last_ = std::abs(to[axis_c]) < std::abs(to[axis_w]);
    // See TileTask::reads_directly.
    lies_packed_ = from_last_ && (gemm_.near_k == 0 || c_.taps_lie_apart()) && gemm_.parts == 1 &&
                   bytes_ == size_of(c_.problem.dtype) && (bytes_ != 4 || c_.problem.compute == Compute::f32) &&
                   c_.reduced == c_.padded(c_.reduced) && from[axis_w] * c_.taps[2].step % 4096 != 0;
    neighbours_ = forward || geo_.stride[2] == 1;  // pixels of one phase lie side by side
    for (const Phase& phase : c_.phases) most_taps_ = std::max(most_taps_, phase.tap_count);
  }

  int64_t tile_sums() const { return int64_t(gemm_.max_rows) * gemm_.cols * (bytes_ == 8 ? 8 : 4); }

  Choice candidate(bool rows, int64_t d, int64_t h, int64_t w, BoxLayout layout) const {
    Choice choice;
    choice.rows = rows;
    choice.tile[0] = d;
    choice.tile[1] = h;
    choice.tile[2] = w;
    choice.box = std::move(layout);
    choice.most = rows ? gemm_.max_rows : gemm_.cols;
    choice.unit = rows ? (choice.most == 32 ? 16 : 1) : gemm_.run_half ? choice.most / 2 : choice.most;
    const int64_t results = std::max<int64_t>(c_.results, 1);
    choice.panels = ceil_div(results, rows ? gemm_.cols : gemm_.max_rows);
    choice.panel = rows ? gemm_.cols : ceil_div(results, choice.panels);

    const int64_t tiles = ceil_div(c_.extent[0], d) * ceil_div(c_.extent[1], h) * ceil_div(c_.extent[2], w);
    choice.tasks = geo_.N * geo_.G * tiles;
    const int64_t even_share = std::max<int64_t>(1, choice.panels / ceil_div(tasks_wanted, choice.tasks));
    // At most so many strips: joined rows, or rows cut where the set of landing taps changes.
    const int64_t segments = std::min<int64_t>(w, 2 * int64_t(c_.taps[2].offset.size()) + 1);
    choice.strips = std::max(ceil_div(joined(choice), choice.most), h * (ceil_div(w, choice.most) + segments)) * d;

    // A task that packs panels for itself takes two of bf16 if it can: the lines of one, every so many bytes, would
    // fall into few sets of the caches.
    const bool own = geo_.N * tiles == 1 && gemm_.parts == 1;
    const int64_t wanted = std::max<int64_t>(even_share, choice.panels < tasks_wanted ? 1 : 4 / bytes_);
    set_blocks(choice, even_share, own ? std::min(wanted, c_.panels_together()) : 0);
    if (choice.share < choice.own_panels) set_blocks(choice, even_share, choice.share);
    return choice;
  }

  // The blocks of channels, with so many panels of the weight packed by the task itself.
  void set_blocks(Choice& choice, int64_t even_share, int64_t own_panels) const {
    choice.own_panels = own_panels;
    // As many summed channels as the budget of the box allows, in even blocks.
    const int64_t positions = choice.box.positions(), all = c_.padded(c_.reduced);
    const int64_t multiple = std::max<int64_t>(gemm_.k_multiple, 16);
    const int64_t budget = box_budget_of(choice.rows);
    int64_t fitting = std::min(all, budget / (positions * bytes_ * gemm_.parts) / multiple * multiple);
    if (gemm_.near_k > 0)  // every strip reads the whole panel
      fitting = std::min(fitting, panel_budget / (most_taps_ * gemm_.cols * bytes_ * gemm_.parts) / multiple *
                                      multiple);
    if (choice.own_panels > 0) {
      const int64_t row = most_taps_ * choice.panel * choice.own_panels * bytes_;
      fitting = std::min(fitting, own_panel_budget / row / multiple * multiple);
    }
    choice.count = ceil_div(c_.reduced, std::max(fitting, std::min(all, multiple)));
    choice.block = std::min(all, round_up(ceil_div(c_.reduced, choice.count), multiple));
    choice.count = ceil_div(c_.reduced, choice.block);
    choice.box_bytes = positions * row_pitch(choice.block, bytes_) * bytes_ * gemm_.parts;
    share_panels(choice, std::max(even_share, choice.own_panels));
  }

  // The same with larger tasks where there are few threads: panels do not change the order of sums, and the fewer
  // tasks, the less often a box is packed. It shows beside tiles only.
  void share_among(Choice& choice, int64_t threads, int64_t limit) const {
    if (gemm_.near_k == 0) return;
    const int64_t wanted = threads > 1 ? ceil_div(4 * threads, choice.tasks) : 1;
    Choice larger = choice;
    int64_t share = std::max(choice.share, (2 * choice.panels + wanted) / (2 * wanted));
    // A task of few pixels hardly uses its weight again, but the next one can.
    const int64_t panel_bytes = c_.tap_total * choice.panel * c_.padded(c_.reduced) * bytes_ * gemm_.parts;
    if (choice.own_panels == 0 && choice.tasks >= 4 && joined(choice) * choice.tile[0] <= 2 * choice.most)
      share = std::clamp(near_weight / panel_bytes, int64_t(1), share);
    share_panels(larger, share);
    if (workspace(larger) + (threads - 1) * (larger.box_bytes + larger.sums_bytes) <= limit) choice = larger;
  }

  // Bytes for one thread, a little generously.
  int64_t workspace(const Choice& choice) const {
    const int64_t channels = round_up(c_.reduced, std::max<int64_t>(gemm_.k_multiple, 16)) + choice.count * 32;
    const int64_t weight = choice.own_panels ? most_taps_ * choice.panel * choice.own_panels * (choice.block + 32)
                                             : c_.tap_total * choice.panels * choice.panel * geo_.G * channels;
    return choice.box_bytes + choice.sums_bytes + 4096 + weight * bytes_ * gemm_.parts;
  }

  double cycles(const Choice& choice) const {
    const double taps = double(c_.tap_total), reduced = double(c_.reduced), phases = double(phases_);
    const double d = double(choice.tile[0]), h = double(choice.tile[1]), w = double(choice.tile[2]);
    const double positions = double(choice.box.positions()), repeats = double(ceil_div(choice.panels, choice.share));
    const int64_t half = gemm_.run_half ? gemm_.cols / 2 : gemm_.cols;
    // Of few rows, every step waits for the step before it.
    const double least_rows = gemm_.latency_cycles * gemm_.flops_cycle / (2.0 * gemm_.cols);
    const double columns = choice.rows ? double(round_up(c_.results, half))
                                       : double(choice.panels) * (std::max(double(choice.panel), least_rows) + 0.7);
    const double pixels = d * std::min(strip_cost(choice, joined(choice)), h * strip_cost(choice, choice.tile[2]));

    double tile = pixels * columns * double(c_.padded(c_.reduced)) * taps * 2.0 / gemm_.flops_cycle;
    tile += double(choice.strips * choice.panels * choice.count) * (call_cycles * phases + tap_cycles * taps);
    tile += positions * reduced * repeats * (from_last_ == choice.rows ? copy_cycles : transpose_cycles);
    tile += positions * repeats * line_cycles * (from_last_ ? 1.0 : reduced / double(choice.box.pitch));
    const bool whole_lines = to_last_ == choice.rows && (choice.rows || neighbours_);
    tile += d * h * w * double(c_.results) * phases * (whole_lines ? store_cycles : scatter_cycles);
    tile += double(choice.count - 1) * pixels * columns * sums_cycles;
    tile += taps * reduced * double(c_.results * bytes_ * gemm_.parts) / 16.0;  // the weight, from L2 or beyond
    // While a tile is read where it lies, the next one and the results arrive.
    const double arriving = d * h * w * double(c_.results * size_of(c_.problem.out_dtype)) * phases / repeats;
    const double panel = double(most_taps_ * choice.panel * choice.block * bytes_);
    const bool direct = lies_packed_ && choice.rows;
    if (direct && gemm_.near_k == 0 && 2 * double(choice.box_bytes) + arriving + 2 * panel > quiet_bytes) tile *= 1.05;
    const int64_t budget = box_budget_of(choice.rows);
    if (choice.box_bytes > budget) tile *= 1.0 + 0.1 * double(choice.box_bytes) / double(budget);
    // Tasks that do not share out evenly among four threads wait for each other.
    const double tasks = double(choice.tasks) * repeats, uneven = std::ceil(tasks / 4) * 4 / std::max(tasks, 1.0);
    const double weight = taps * reduced * double(geo_.G * c_.results);
    return tile * double(choice.tasks) * (0.75 + 0.25 * uneven) +
           weight * (choice.own_panels ? own_weight_cycles : weight_cycles);
  }

 private:
  // Panels of a task: so many, unless sums between channel blocks would take too much.
  void share_panels(Choice& choice, int64_t most) const {
    choice.share = std::clamp(most, int64_t(1), choice.panels);
    if (choice.count > 1)
      choice.share = std::clamp(sums_budget / (choice.strips * phases_ * tile_sums()), int64_t(1), choice.share);
    choice.sums_bytes = (choice.count > 1 ? choice.strips * choice.share * phases_ : 2) * tile_sums();
  }
  // Tiles that are not packed may be larger where they fill rows of tiles: L2 holds twice as much there.
  int64_t box_budget_of(bool rows) const { return rows && lies_packed_ && gemm_.near_k > 0 ? 1 << 20 : box_budget; }
  static int64_t joined(const Choice& choice) { return (choice.tile[1] - 1) * choice.box.pitch + choice.tile[2]; }
  static double strip_cost(const Choice& choice, int64_t pixels) {
    return double(round_up(pixels, choice.unit)) + 0.5 * double(ceil_div(pixels, choice.most) * choice.unit);
  }

  const Correlation& c_;
  const Geometry& geo_;
  const Gemm& gemm_;
  int64_t bytes_, phases_, most_taps_ = 1;
  bool from_last_, to_last_, lies_packed_, neighbours_;
};

}  // namespace

double Correlation::choose_blocking(int64_t element_bytes, int64_t limit, int64_t& minimum) {
  const Search search(*this, element_bytes);
  double best = -1;
  Choice chosen;
  minimum = INT64_MAX;
  for (int64_t w : cuts(extent[2], 24, taps[2].offset.size())) {
    const AxisLayout axis_w = layout_axis(taps[2].step, taps[2].offset, w);
    for (int64_t h : cuts(extent[1], 1, taps[1].offset.size())) {
      const AxisLayout axis_h = layout_axis(taps[1].step, taps[1].offset, h);
      for (int64_t d : cuts(extent[0], 1, taps[0].offset.size())) {
        const BoxLayout layout(layout_axis(taps[0].step, taps[0].offset, d), axis_h, axis_w, 1);
        for (bool rows : {true, false}) {
          const Choice choice = search.candidate(rows, d, h, w, layout);
          const int64_t bytes = search.workspace(choice);
          minimum = std::min(minimum, bytes);
          const double cycles = bytes > limit ? -1 : search.cycles(choice);
          if (cycles < 0 || (best >= 0 && cycles >= best)) continue;
          best = cycles;
          chosen = choice;
        }
      }
    }
  }
  if (best < 0) return -1;
  search.share_among(chosen, problem.threads, limit);
  pixels_are_rows = chosen.rows;
  for (int axis = 0; axis < 3; ++axis) {
    tile[axis] = chosen.tile[axis];
    tiles[axis] = ceil_div(extent[axis], tile[axis]);
  }
  box = chosen.box;
  channel_block = chosen.block;
  channel_blocks = chosen.count;
  const auto spaced = [&](int64_t pad) { return pixels_are_rows ? pad : row_pitch(pad, element_bytes); };
  const int64_t last_block = reduced - (channel_blocks - 1) * channel_block;
  channel_pad = (channel_blocks - 1) * spaced(channel_block) + spaced(padded(last_block));
  panel = chosen.panel;
  panels = chosen.panels;
  panels_block = chosen.share;
  blocks = ceil_div(panels, panels_block);
  own_panels = chosen.own_panels;
  int64_t most_taps = 0;
  for (const Phase& phase : phases) most_taps = std::max(most_taps, phase.tap_count);
  strips_outside = taps_inside() && own_panels == 0 &&
                   panels_block * panel * most_taps * channel_block * element_bytes * gemm->parts <= panels_budget;
  const int64_t weight_elements = own_panels ? spaced(channel_block) * most_taps * panel * own_panels
                                             : problem.geo.G * channel_pad * tap_total * panels * panel;
  weight_plane = round_up(weight_elements * element_bytes + 256, 64);
  weight_bytes = own_panels ? 0 : gemm->parts * weight_plane;
  box_plane = round_up(chosen.box_bytes / gemm->parts + 2 * gemm->cols * element_bytes, 64);
  box_bytes = gemm->parts * box_plane;
  sums_bytes = chosen.sums_bytes;
  slot_bytes = box_bytes + sums_bytes + (own_panels ? weight_plane : 0);
  return best;
}

std::string Correlation::describe() const {
  char text[400];
  std::snprintf(text, sizeof text,
                "%s; %zu phase%s, %lld taps; tile %lldx%lldx%lld pixels (%lld tiles), box %lld positions x %lld of "
                "%lld channels, %lld panels of %lld result channels in %lld blocks%s; %lld tasks",
                pixels_are_rows ? "pixels are rows" : "pixels are columns", phases.size(),
                phases.size() == 1 ? "" : "s",
                (long long)tap_total, (long long)tile[0], (long long)tile[1], (long long)tile[2],
                (long long)(tiles[0] * tiles[1] * tiles[2]), (long long)box.positions(), (long long)channel_block,
                (long long)reduced, (long long)panels, (long long)panel, (long long)blocks,
                own_panels ? ", packed where they are used" : "", (long long)tasks());
  return text;
}

}  // namespace convgrad
