// Depthwise and grouped convolutions with few channels per group: output and input gradient, planned and run.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>

#include "direct.h"
#include "grouped.h"
#include "line.h"
#include "threads.h"

namespace convgrad {

// Cycles per vector, measured on Zen 4 (f32, AVX-512, data in the second-level cache).
static constexpr double cycles_per_product = 1.15, cycles_across_channels = 4, cycles_transposed = 10,
                        cycles_one_by_one = 60, cycles_direct = 2, cycles_line = 6;
static constexpr double cycles_per_byte = 0.25;  // of memory, one core
static constexpr int64_t cache_bytes = 16 << 20;  // results that move more are written around the caches
static constexpr int64_t tasks_wanted = 16;  // so that a few threads share the work evenly; a constant, for the bits

// Cycles to bring one vector of a tensor with these nominal strides into lane form, or out of it.
double lane_move_cycles(const int64_t* stride, int64_t bytes, int64_t channels, const LaneSpread& spread) {
  const bool power = (channels & (channels - 1)) == 0 && channels <= 16;
  if (spread.images == 1 && power && stride[axis_c] == bytes) return cycles_across_channels + (channels > 1 ? 3 : 0);
  return stride[axis_w] == bytes ? cycles_transposed : cycles_one_by_one;
}

// NOTE: the stretches were weighed on Zen 4: channels last with 64 of 2048 bytes at a time moved at half the speed.
LaneCut choose_lane_cut(const Problem& problem, const LaneSpread& spread, const int64_t* stride, int64_t channels,
                        const int64_t* size, int64_t limit_vectors,
                        const std::function<int64_t(const int64_t*)>& vectors) {
  const int64_t bytes = size_of(problem.dtype);
  const bool last = stride[axis_c] == bytes;
  LaneCut best{};
  double best_cost = -1;
  for (int64_t most = 1; most <= 8; most *= 2) {
    const int64_t together = divide_up(spread.weight_blocks, divide_up(spread.weight_blocks, most));
    if (most > 1 && (together <= best.together || spread.images > 1)) continue;
    // A stretch of memory that is read or written at once: channels, or the pixels of as many small planes.
    const int64_t plane = problem.geo.in_pixels() * channels * bytes;
    const double stretch = double(together * spread.lanes * (last ? channels * bytes : plane));
    const double weight = last ? 1 + 250.0 / stretch : 1 + 2000.0 / stretch;
    double cost = 0;
    const BoxCut cut = choose_box(size, spread.image_blocks * divide_up(spread.weight_blocks, together), limit_vectors,
                                  [&](const int64_t* e) { return together * vectors(e); }, &cost);
    cost *= weight * double(divide_up(spread.weight_blocks, together));
    if (best_cost < 0 || cost < best_cost) best = {cut, together}, best_cost = cost;
  }
  return best;
}

BoxCut choose_box(const int64_t* size, int64_t blocks, int64_t limit_vectors,
                  const std::function<int64_t(const int64_t*)>& vectors, double* least) {
  BoxCut best{};
  double best_cost = -1;
  const auto halves = [](int64_t n) {
    std::vector<int64_t> list;
    for (int64_t parts = 1; parts < 2 * n; parts *= 2) {
      const int64_t extent = divide_up(n, std::min(parts, n));
      if (list.empty() || list.back() != extent) list.push_back(extent);
    }
    return list;
  };
  for (int64_t z : halves(size[0]))
    for (int64_t y : halves(size[1]))
      for (int64_t x : halves(size[2])) {
        BoxCut cut{{z, y, x}, {divide_up(size[0], z), divide_up(size[1], y), divide_up(size[2], x)}};
        const int64_t held = vectors(cut.extent), tasks = blocks * cut.boxes();
        const double idle = double(up_to_multiple(tasks, tasks_wanted)) / tasks;
        // A box too large for the cache is the worse the larger it is; each box has a fixed cost of its own.
        const double crowding = held > limit_vectors ? 4.0 * held / limit_vectors : 1;
        // Parts of rows do not lie together in memory: they are moved row by row, in whole vectors.
        const double parts = x == size[2] ? 1 : 1.1 * double(up_to_multiple(x, most_lanes)) / double(x);
        // Rows of one plane do: the fewer planes the better.
        const double row_cost = 8.0 * z * y + 4.0 * (z - 1);
        const double cost = (held + row_cost + 200) * cut.boxes() * std::min(idle, 2.0) * crowding * parts;
        if (best_cost < 0 || cost < best_cost) best = cut, best_cost = cost;
      }
  if (least) *least = best_cost;
  return best;
}

// Cycles of the direct kernels of groups; measured on Zen 4, as a time (fit_workspace counts slower cycles).
static double group_cycles(const DirectUnits& units, double pixels, double reach, bool slides, bool strided) {
  const bool pairs = units.dtype == Dtype::bf16, shared = units.group_to < units.lanes;
  const double words = double(units.group_from) / (pairs ? 2 : 1);
  const double one_tap = pairs ? (strided ? 1.6 : 1.25) : strided ? 1.35 : 1.2;
  // Weights of a unit that fill L2 come from beyond it for every tile of pixels.
  const double far = words * reach * double(units.lanes) * 4 > (256 << 10) ? 1.3 : 1;
  const double per_word = far * (shared ? (pairs ? 2.3 : 1.5) : slides ? 1.1 : one_tap);
  return 0.83 * pixels * double(units.units()) * (words * reach * per_word + 10);
}

// Why the lane kernels do not serve a problem, or an empty string.
std::string lanes_refuse(const Problem& problem) {
  const Geometry& g = problem.geo;
  const int64_t most = g.G == 1 ? 256 : 128;
  if (g.group_in() > most || g.group_out() > most)
    return std::to_string(g.group_in()) + " input and " + std::to_string(g.group_out()) +
           " output channels per group: above " + std::to_string(most) + " the dense kernels are better";
  if (!g.N || !g.C || !g.K || !g.out_pixels() || !g.in_pixels()) return "a tensor without elements";
  return "";
}

namespace {

struct CorrelatePlan {
  Problem problem;
  LaneWay correlation;
  LaneSpread spread;
  LaneKernels kernels;
  BoxCut cut;
  std::vector<LanePhase> phases[3];
  int64_t packed_bytes, finite_bytes, slab_vectors, scratch_bytes, together, batch;
  bool stream;
  DirectUnits units;  // of the direct kernels, which take arrays with channels last
  bool direct;
  int64_t direct_rows, direct_planes, direct_splits;  // rows and planes of a task; ranges of units
  LineCorrelation line{};  // what the lines of a problem along one axis share
  bool lines;              // its kernel takes arrays whose pixels lie together
  bool line_pairs = false; // two pixels of bf16 in one product

  explicit CorrelatePlan(const Problem& p)
      : problem(p), correlation{&problem.geo, p.wrt == wrt_input},
        spread(p.geo, p.isa->vector_bytes / element_bytes()), kernels(p.isa->level) {
    direct = direct_units(problem, units) && p.dtype == p.out_dtype;
    if (direct) units.pair = direct_pair(problem);
    else direct = group_units(problem, units);
#if defined(__x86_64__)
    if (units.pair) kernels.direct = avx512_bf16::correlate_direct;
    if (units.group_to && direct)
      kernels.direct = p.dtype == Dtype::f32 ? avx512::correlate_groups : avx512_bf16::correlate_groups;
#endif
    // Whole planes, or bands of rows of all planes where the planes that a result reads would leave the cache. A band
    // reads rows of its neighbours again: it is taller than the kernel unless there are too few tasks.
    const int64_t *size = correlation.to_size(), *from = correlation.from_size();
    const int64_t row = p.geo.C * from[2] * size_of(p.dtype) * p.geo.kernel[0], spare = 4 * p.geo.kernel[1];
    const int64_t most = p.geo.kernel[0] > 1 ? l2_bytes / 2 / std::max<int64_t>(1, row) : size[1];
    int64_t bands = divide_up(size[1], std::max(most, spare));
    bands = std::max(bands, std::min(divide_up(tasks_wanted, p.geo.N), divide_up(size[1], spare)));
    direct_rows = divide_up(size[1], bands);
    const int64_t slabs = std::min(divide_up(tasks_wanted, p.geo.N * bands), divide_up(size[0], 2 * p.geo.kernel[0]));
    direct_planes = divide_up(size[0], slabs);
    lines = prepare_lines();
#if defined(__x86_64__)
    line_pairs = lines && bf16_pairs(problem) && line.step == 1 && line.taps >= fewest_long_taps;
    if (line_pairs) kernels.lines = avx512_bf16::correlate_lines;
#endif
    const int64_t least = p.geo.taps() < 25 ? 4 : 1;  // units of a task: a stretch of memory, or much work on each
    const int64_t most_splits = direct ? divide_up(units.units(), least) : 1;
    direct_splits = std::clamp<int64_t>(tasks_wanted / (p.geo.N * bands * slabs), 1, most_splits);
  }
  CorrelatePlan(const CorrelatePlan&) = delete;

  int64_t element_bytes() const { return problem.dtype == Dtype::f64 ? 8 : 4; }

  bool prepare_lines();
  bool run_lines(const Arguments& args, const Tensor& from, const Tensor& to) const;
  void run_direct(const Arguments& args, const Tensor& from, const Tensor& to) const;
  void run(const Arguments& args) const;
};

bool CorrelatePlan::prepare_lines() {
  const Geometry& geo = problem.geo;
  // With padding on another axis its only tap lands beside the tensor: there is no term at all.
  const bool one_axis = geo.in[0] * geo.in[1] == 1 && geo.out[0] * geo.out[1] == 1 && geo.taps() == geo.kernel[2] &&
                        geo.pad[0] == 0 && geo.pad[1] == 0;
  const bool vectors = problem.out_dtype == Dtype::f32 || problem.out_dtype == Dtype::bf16 ||
                       (problem.out_dtype == Dtype::f16 && problem.isa->level >= 1);
  const int64_t span = (geo.kernel[2] - 1) * geo.dilation[2];
  line.operand = operand_code(problem);
  line.result = result_code(problem);
  line.from_size = correlation.from_size()[2];
  line.to_size = correlation.to_size()[2];
  line.taps = geo.kernel[2];
  line.step = geo.dilation[2];
  line.pad = correlation.input ? span - geo.pad[2] : geo.pad[2];
  // The order of the other kernels, see parts_of_rows: pixels ascend where taps slide, otherwise taps do.
  line.backwards = correlation.input && (line.taps < 3 || line.step > 1);
  return one_axis && vectors && problem.dtype != Dtype::f64 && geo.group_in() == 1 && geo.group_out() == 1 &&
         geo.stride[2] == 1 && line.scratch_floats() * 4 <= l2_bytes / 8;
}

// Every channel of every image is a line. False where weights hold Inf or NaN: they must meet no padding.
bool CorrelatePlan::run_lines(const Arguments& args, const Tensor& from, const Tensor& to) const {
  const Geometry& geo = problem.geo;
  const int64_t pieces = std::min(geo.C, divide_up(2 * tasks_wanted, geo.N)), taps = line.taps;
  float* weights = reinterpret_cast<float*>(args.workspace);
  bool* finite = reinterpret_cast<bool*>(args.workspace + packed_bytes);
  parallel_for(spread.weight_blocks, args.threads, [&](int64_t block, int) {
    finite[block] = true;
    for (int64_t c = block * spread.lanes; c < std::min(geo.C, (block + 1) * spread.lanes); ++c) {
      read_taps(geo, args.w, args.w.data + c * args.w.stride[axis_o], line.operand, weights + c * taps);
      for (int64_t s = 0; s < taps; ++s) finite[block] &= std::isfinite(weights[c * taps + s]);
      if (correlation.input) std::reverse(weights + c * taps, weights + (c + 1) * taps);
    }
  });
  if (!std::all_of(finite, finite + spread.weight_blocks, [](bool f) { return f; })) return false;
  parallel_for(geo.N * pieces, args.threads, [&](int64_t task, int slot) {
    const int64_t image = task / pieces, first = geo.C * (task % pieces) / pieces;
    LineCorrelation job = line;
    job.from = from.data + image * from.stride[axis_n] + first * from.stride[axis_c];
    job.to = to.data + image * to.stride[axis_n] + first * to.stride[axis_c];
    job.from_line = from.stride[axis_c];
    job.to_line = to.stride[axis_c];
    job.lines = geo.C * (task % pieces + 1) / pieces - first;
    job.weights = weights + first * taps;
    job.stream = stream;
    job.scratch = reinterpret_cast<float*>(args.workspace + packed_bytes + finite_bytes + slot * scratch_bytes);
    kernels.lines(job);
  });
  return true;
}

void CorrelatePlan::run_direct(const Arguments& args, const Tensor& from, const Tensor& to) const {
  const Geometry& geo = problem.geo;
  float* packed = reinterpret_cast<float*>(args.workspace);
  const ElementCode code = operand_code(problem);
  const int64_t *size = correlation.to_size(), bands = divide_up(size[1], direct_rows), bytes = size_of(problem.dtype);
  const int64_t slabs = divide_up(size[0], direct_planes);
  // A unit is written around the caches where it is a whole line of them.
  int64_t lines = reinterpret_cast<intptr_t>(to.data) | units.channels * bytes;
  for (int axis : {axis_n, axis_d, axis_h, axis_w}) lines |= to.stride[axis];
  const bool around = stream && problem.isa->vector_bytes == 64, whole_lines = lines % 64 == 0;
  const bool rows = to.stride[axis_w] == units.channels * bytes && size[2] * to.stride[axis_w] + 64 <= scratch_bytes;
  char* const scratch = args.workspace + packed_bytes + finite_bytes;
  // Weights that one task uses are packed by it, unit by unit: they are multiplied with before they leave the cache.
  const auto pack_unit = [&](int64_t unit) { pack_group_unit(problem, units, args.w, code, unit, packed); };
  const bool used_once = units.group_to && direct_splits > 1 && geo.N * bands * slabs == 1;
  if (!units.group_to) pack_direct(geo, units, args.w, code, packed, args.threads);
  else if (!used_once) parallel_for(units.units(), args.threads, [&](int64_t unit, int) { pack_unit(unit); });
  parallel_for(geo.N * bands * slabs * direct_splits, args.threads, [&](int64_t task, int slot) {
    const int64_t split = task % direct_splits, band = task / direct_splits % bands;
    const int64_t slab = task / direct_splits / bands % slabs, image = task / direct_splits / bands / slabs;
    DirectRows job{};
    job.units = units;
    job.from = from.data + image * from.stride[axis_n];
    job.to = to.data + image * to.stride[axis_n];
    job.from_stride = from.stride;
    job.to_stride = to.stride;
    job.weights = packed;
    job.taps = geo.taps();
    job.weight_tap[0] = geo.kernel[1] * geo.kernel[2];
    job.weight_tap[1] = geo.kernel[2];
    job.weight_tap[2] = 1;
    for (int a = 0; a < 3; ++a) {
      job.source_size[a] = correlation.from_size()[a];
      job.phase[a] = phases[a].data();
      job.phases[a] = int64_t(phases[a].size());
    }
    job.first_unit = units.units() * split / direct_splits;
    job.unit_count = units.units() * (split + 1) / direct_splits - job.first_unit;
    job.first[0] = slab * direct_planes;
    job.extent[0] = std::min(direct_planes, size[0] - job.first[0]);
    job.first[1] = band * direct_rows;
    job.extent[1] = std::min(direct_rows, size[1] - job.first[1]);
    job.width = size[2];
    job.stream = around && whole_lines;
    job.row = around && !whole_lines && rows ? scratch + slot * scratch_bytes : nullptr;
    if (!used_once) return kernels.direct(job);
    const int64_t last = job.first_unit + job.unit_count;
    for (job.unit_count = 1; job.first_unit < last; ++job.first_unit) {
      pack_unit(job.first_unit);
      kernels.direct(job);
    }
  });
}

void CorrelatePlan::run(const Arguments& args) const {
  const Geometry& geo = problem.geo;
  const bool input = correlation.input;
  const Tensor &from = input ? args.y : args.x, &to = input ? args.x : args.y;
  if (direct && direct_fits(units, from, to)) return run_direct(args, from, to);
  const bool dense_x = from.stride[axis_w] == size_of(problem.dtype) && to.stride[axis_w] == size_of(problem.out_dtype);
  if (lines && dense_x && run_lines(args, from, to)) return;
  const ElementCode operand = operand_code(problem), result = result_code(problem);
  char* packed = args.workspace;
  bool* finite = reinterpret_cast<bool*>(packed + packed_bytes);
  char* scratch = packed + packed_bytes + finite_bytes;
  pack_lane_weights(geo, spread, args.w, operand, packed, finite, args.threads);

  const int64_t vector_bytes = problem.isa->vector_bytes, taps = geo.taps();
  const int64_t block_vectors = geo.group_out() * geo.group_in() * taps;
  const int64_t wide_blocks = divide_up(spread.weight_blocks, together), boxes = cut.boxes();
  parallel_for(spread.image_blocks * boxes * wide_blocks, args.threads, [&](int64_t task, int slot) {
    const int64_t image_block = task / wide_blocks / boxes, first = task % wide_blocks * together;
    const int64_t blocks = std::min(together, spread.weight_blocks - first);
    char* slab = scratch + slot * scratch_bytes;
    LaneCorrelation job{};
    job.to_box = cut.box(task / wide_blocks % boxes, correlation.to_size());
    job.source_box = correlation.source(job.to_box);
    job.slab = slab;
    job.batch = batch;
    job.rows = slab + together * slab_vectors * vector_bytes;
    job.passes = blocks;
    job.parts = correlation.to_channels();
    job.images = 1;
    job.weight_pass = block_vectors;
    job.weight_to = (input ? 1 : geo.group_in()) * taps;
    job.weight_from = (input ? geo.group_in() : 1) * taps;
    job.weight_tap[0] = geo.kernel[1] * geo.kernel[2];
    job.weight_tap[1] = geo.kernel[2];
    job.weight_tap[2] = 1;
    job.source_channels = correlation.from_channels();
    for (int a = 0; a < 3; ++a) {
      job.source_size[a] = correlation.from_size()[a];
      job.phase[a] = phases[a].data();
      job.phases[a] = int64_t(phases[a].size());
    }
    kernels.load(spread.planes(geo, from, job.source_channels, operand, image_block, first, blocks), job.source_box,
                 job.source_size, slab);
    if (operand.round) {
      const int64_t* e = job.source_box.extent;
      operand.round(reinterpret_cast<float*>(slab), blocks * job.source_channels * e[0] * e[1] * e[2] * spread.lanes);
    }
    job.weights = packed + first * block_vectors * vector_bytes;
    job.finite = finite + first;
    job.to = spread.planes(geo, to, correlation.to_channels(), result, image_block, first, blocks);
    job.to.stream = stream;
    kernels.correlate(job);
  });
}

}  // namespace

std::optional<Plan> plan_grouped(const Problem& problem, std::string& why_not) {
  why_not = lanes_refuse(problem);
  if (!why_not.empty()) return std::nullopt;
  if (LaneWay{&problem.geo, problem.wrt == wrt_input}.too_many_phases()) {
    why_not = "more phases than " + std::to_string(LaneWay::most_phases);
    return std::nullopt;
  }
  DirectUnits sole;
  if (problem.geo.G == 1 && (!group_units(problem, sole) || problem.x_nominal[axis_c] != size_of(problem.dtype))) {
    why_not = "groups=1: there are no lanes to fill with groups";
    return std::nullopt;
  }
  if (problem.wrt == wrt_weight || problem.wrt == (wrt_weight | wrt_bias)) return plan_grouped_weight(problem, why_not);
  if (problem.wrt != wrt_output && problem.wrt != wrt_input) {
    why_not = "this combination of results is served one by one";
    return std::nullopt;
  }
  auto p = std::make_shared<CorrelatePlan>(problem);
  const Geometry& geo = p->problem.geo;
  const LaneWay& way = p->correlation;
  const int64_t vector_bytes = problem.isa->vector_bytes, bytes = size_of(problem.dtype);
  for (int a = 0; a < 3; ++a) p->phases[a] = way.phases(a);

  const int64_t* from_nominal = way.input ? problem.y_nominal : problem.x_nominal;
  const int64_t* to_nominal = way.input ? problem.x_nominal : problem.y_nominal;
  const int64_t moved = geo.N * (geo.C * geo.in_pixels() + geo.K * geo.out_pixels()) * bytes;
  p->stream = moved > cache_bytes;

  const auto slab = [&](const int64_t* extent) {
    return way.from_channels() * way.source_extent(0, extent[0]) * way.source_extent(1, extent[1]) *
           way.source_extent(2, extent[2]);
  };
  // As many rows at once as make whole vectors of pixels, where pixels lie together; never more than the box has.
  const auto batch = [&](const int64_t* extent) {
    const int64_t whole = p->spread.lanes / std::gcd(p->spread.lanes, extent[2]);
    return std::min<int64_t>({extent[1], most_batch, std::max<int64_t>(whole, divide_up(128, extent[2]))});
  };
  const auto held = [&](const int64_t* extent) { return slab(extent) + way.to_channels() * batch(extent) * extent[2]; };
  int64_t limit = l2_bytes / 3 / vector_bytes;
  p->packed_bytes = p->spread.weight_blocks * geo.group_out() * geo.group_in() * geo.taps() * vector_bytes;
  if (p->direct) p->packed_bytes = std::max(p->packed_bytes, p->units.units() * p->units.tap_floats() * geo.taps() * 4);
  p->packed_bytes = up_to_multiple(p->packed_bytes, 64);
  p->finite_bytes = up_to_multiple(p->spread.weight_blocks, 64);
  const int64_t shared = p->packed_bytes + p->finite_bytes;
  for (;; limit /= 2) {
    const LaneCut cut = choose_lane_cut(problem, p->spread, from_nominal, std::min(geo.group_in(), geo.group_out()),
                                        way.to_size(), limit, held);
    p->cut = cut.boxes;
    p->together = cut.together;
    p->slab_vectors = slab(p->cut.extent);
    p->batch = batch(p->cut.extent);
    p->scratch_bytes = up_to_multiple(p->together * held(p->cut.extent) * vector_bytes, 64);
    const int64_t line_bytes = p->lines ? p->line.scratch_floats() * (p->line_pairs ? 8 : 4) : 0;
    p->scratch_bytes = std::max(p->scratch_bytes, up_to_multiple(line_bytes, 64));
    if (shared + p->scratch_bytes <= problem.max_workspace || limit <= 1) break;
  }

  const double vectors_out = double(p->spread.image_blocks) * p->spread.weight_blocks * way.to_size()[0] *
                             way.to_size()[1] * way.to_size()[2] * way.to_channels();
  const double vectors_in = double(p->spread.image_blocks) * p->spread.weight_blocks * p->cut.boxes() * p->slab_vectors;
  double reach = landing_share(geo);  // taps per destination pixel
  for (int a = 0; a < 3; ++a) reach *= double(geo.kernel[a]) / (way.input ? geo.stride[a] : 1);
  const bool direct = p->direct && from_nominal[axis_c] == bytes && to_nominal[axis_c] == bytes;
  double cycles = lane_weight_cycles(geo) +
                  vectors_out * reach * way.from_channels() * (way.to_channels() > 1 ? 1.05 : cycles_per_product);
  const bool lines = p->lines && !direct && from_nominal[axis_w] == bytes && to_nominal[axis_w] == bytes;
  if (direct && p->units.group_to)
    cycles = (problem.isa->two_wide_fmas ? 0.6 : 1) *
             group_cycles(p->units, double(geo.N) * way.to_size()[0] * way.to_size()[1] * way.to_size()[2], reach,
                          geo.kernel[2] / (way.input ? geo.stride[2] : 1) >= 3, !way.input && geo.stride[2] > 1) +
             lane_weight_cycles(geo) / 4;
  else if (direct) cycles += vectors_out * cycles_direct;
  else if (lines) cycles += vectors_out * cycles_line;
  else
    cycles += vectors_in * lane_move_cycles(from_nominal, bytes, way.from_channels(), p->spread) +
              vectors_out * lane_move_cycles(to_nominal, bytes, way.to_channels(), p->spread);

  Plan plan;
  const bool paired = direct ? p->units.pair || (p->units.group_to && problem.dtype == Dtype::bf16)
                             : lines && p->line_pairs;
  plan.kernel = std::string(geo.group_in() == 1 ? "depthwise" : "grouped") +
                (direct ? "_direct" : lines ? "_line" : "") +
                (paired ? "_bf16_" : problem.dtype == Dtype::f64 ? "_f64_" : "_f32_") +
                std::to_string(p->spread.lanes) + "lanes_" +
                (paired ? "avx512_bf16" : compiled_level(problem.isa->level));
  // Nothing but products and memory to estimate; the dense estimates for groups were found a tenth too low.
  if (direct || lines) plan.doubt = p->units.group_to ? 0.9 : 1;
  const double bound = std::max(cycles, double(moved) * cycles_per_byte);
  if (!fit_workspace(plan, problem, shared, p->scratch_bytes, bound, why_not)) return std::nullopt;
  char note[256];
  std::snprintf(note, sizeof note, "%lld boxes of %lldx%lldx%lld pixels, %lld vectors held, %lld tasks",
                (long long)p->cut.boxes(), (long long)p->cut.extent[0], (long long)p->cut.extent[1],
                (long long)p->cut.extent[2], (long long)p->slab_vectors, 
                (long long)(p->spread.image_blocks * divide_up(p->spread.weight_blocks, p->together) * p->cut.boxes()));
  plan.notes.push_back(note);
  plan.run = [p](const Arguments& args) { p->run(args); };
  return plan;
}

}  // namespace convgrad
