// Weight gradient (with the bias gradient in the same pass) of depthwise and small-group convolutions.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "grouped.h"
#include "threads.h"

namespace convgrad {
namespace {

constexpr double cycles_per_byte = 0.25, cycles_per_product = 1.15;
constexpr int64_t tasks_wanted = 16;
constexpr int64_t most_direct_sums = 8 << 20;  // bytes of all chunks
constexpr int64_t most_line_taps = 8;      // every tap reads the line again
constexpr int64_t most_direct_taps = 128;  // above, the sums of a chunk leave the first-level cache for every band

// Items are (image block, box) pairs; a chunk is a range of items whose products are summed by one task into sums of
// its own. The chunks, and so the bits of the result, depend on the problem alone.
struct WeightPlan {
  Problem problem;
  LaneSpread spread;
  LaneKernels kernels;
  BoxCut cut;
  int64_t chunks, together, x_vectors, dy_vectors, sum_vectors, scratch_bytes;
  DirectUnits units;  // of the direct kernels, which take arrays with channels last
  bool direct;
  bool lines;         // along one axis: its kernel takes arrays whose pixels lie together
  int64_t direct_rows, direct_pixels, direct_chunks;  // rows and pixels of dy at a time; chunks of such boxes
  int64_t direct_splits = 1;                          // ranges of units, where there are few boxes

  explicit WeightPlan(const Problem& p)
      : problem(p), spread(p.geo, p.isa->vector_bytes / int(element_bytes())), kernels(p.isa->level) {
    direct = (direct_units(problem, units) || group_units(problem, units)) && p.geo.taps() <= most_direct_taps;
#if defined(__x86_64__)
    if (direct && units.group_to)
      kernels.direct_weight = p.dtype == Dtype::f32 ? avx512::weight_grad_groups : avx512_bf16::weight_grad_groups;
#endif
    // The rows of all channels stay in the second-level cache while unit after unit is summed.
    const int64_t row = geo_row_bytes();
    direct_rows = std::clamp<int64_t>(l2_bytes / 4 / std::max<int64_t>(1, row), 1, p.geo.out[1]);
    const int64_t parts = std::clamp<int64_t>(row * direct_rows / (l2_bytes / 2), 1, divide_up(p.geo.out[2], 16));
    direct_pixels = divide_up(p.geo.out[2], parts);
    if (gathers()) cut_gathered();
    direct_chunks = std::min(gathers() ? divide_up(tasks_wanted, p.geo.G) : tasks_wanted, direct_boxes());
    while (direct && direct_chunks > 1 && direct_bytes() > most_direct_sums)
      direct_chunks = divide_up(direct_chunks, 2);
    const int64_t most_splits = gathers() ? p.geo.G : direct ? divide_up(units.units(), 2) : 1;
    direct_splits = std::clamp<int64_t>(tasks_wanted / direct_chunks, 1, most_splits);
    const Geometry& g = problem.geo;
    lines = g.in[0] * g.in[1] == 1 && g.out[0] * g.out[1] == 1 && g.taps() == g.kernel[2] && g.pad[0] == 0 &&
            g.pad[1] == 0 && g.taps() <= most_line_taps && p.dtype != Dtype::f64 && g.group_in() == 1 && g.group_out() == 1 &&
            g.stride[2] == 1 &&
            line_bytes() <= l2_bytes / 4;
#if defined(__x86_64__)
    if (bf16_pairs(problem)) kernels.line_weight = avx512_bf16::weight_grad_lines;
#endif
  }
  WeightPlan(const WeightPlan&) = delete;

  int64_t element_bytes() const { return problem.dtype == Dtype::f64 ? 8 : 4; }
  bool f64() const { return problem.dtype == Dtype::f64; }
  bool bias() const { return problem.wrt & wrt_bias; }
  int64_t items() const { return spread.image_blocks * cut.boxes(); }
  int64_t geo_row_bytes() const {
    const Geometry& g = problem.geo;
    return (g.K * g.out[2] + g.C * g.in[2] * g.stride[1] * g.kernel[0]) * size_of(problem.dtype);
  }
  int64_t direct_boxes() const {
    const Geometry& g = problem.geo;
    return g.N * g.out[0] * divide_up(g.out[1], direct_rows) * divide_up(g.out[2], direct_pixels);
  }
  int64_t line_bytes() const { return up_to_multiple((problem.geo.in[2] + problem.geo.out[2]) * 4, 64); }
  int64_t direct_entries() const {  // floats of one unit
    return (problem.geo.taps() + bias()) * units.unit() * std::max<int64_t>(1, units.group_from);
  }
  // Groups that fill a vector are summed from copies of their pixels, a box at a time.
  bool gathers() const { return direct && units.group_to >= units.lanes; }
  int64_t gathered_bytes() const {
    const LaneWay reach{&problem.geo, false};
    const int64_t words = up_to_multiple(units.group_from, units.lanes) / units.lanes;
    const int64_t x = reach.source_extent(0, 1) * reach.source_extent(1, direct_rows) *
                      std::min(reach.source_extent(2, direct_pixels), problem.geo.in[2]);
    return (direct_rows * direct_pixels * words + x) * problem.isa->vector_bytes;
  }
  // Boxes whose copies, of as many words as one tile reads, stay in the first-level cache.
  void cut_gathered() {
    const Geometry& g = problem.geo;
    const int64_t fit = 28 << 10, row = (g.in[2] * g.stride[1] * g.kernel[0] + g.out[2]) * problem.isa->vector_bytes;
    const int64_t rows = std::clamp<int64_t>(fit / row, 1, g.out[1]);
    direct_rows = divide_up(g.out[1], divide_up(g.out[1], rows));
    direct_pixels = divide_up(g.out[2], std::clamp<int64_t>(row / fit, 1, divide_up(g.out[2], 48)));
  }
  int64_t direct_bytes() const { return direct_chunks * units.units() * direct_entries() * 4; }

  void chunk(const Arguments& args, int64_t first, int64_t index, char* sums, char* scratch) const;
  template <typename T>
  void finish(const Arguments& args, int64_t block, char* sums) const;
  void run_direct(const Arguments& args) const;
  void write_groups(const Arguments& args, int64_t unit, const float* total) const;
  void run_lines(const Arguments& args) const;
  void run(const Arguments& args) const;
};

// The products of one chunk for `together` weight blocks from `first` on; `sums` is where the first block's go.
void WeightPlan::chunk(const Arguments& args, int64_t first, int64_t index, char* sums, char* scratch) const {
  const Geometry& geo = problem.geo;
  const ElementCode code = operand_code(problem);
  const int64_t vector_bytes = problem.isa->vector_bytes, blocks = std::min(together, spread.weight_blocks - first);
  char *x = scratch, *dy = scratch + together * x_vectors * vector_bytes;
  std::memset(sums, 0, size_t(blocks * sum_vectors * vector_bytes));
  const int64_t bias_at = geo.group_out() * geo.group_in() * geo.taps() * vector_bytes;
  for (int64_t item = items() * index / chunks; item < items() * (index + 1) / chunks; ++item) {
    const int64_t image_block = item / cut.boxes();
    LaneWeightGrad job{};
    job.geo = &geo;
    job.out_parts = geo.group_out();
    job.in_parts = job.sum_step = geo.group_in();
    job.images = 1;
    job.dy_box = cut.box(item % cut.boxes(), geo.out);
    job.x_box = input_box(geo, job.dy_box);
    const int64_t *xe = job.x_box.extent, *ye = job.dy_box.extent;
    const int64_t x_count = geo.group_in() * xe[0] * xe[1] * xe[2], y_pixels = ye[0] * ye[1] * ye[2];
    const int64_t y_count = geo.group_out() * y_pixels;
    const LanePlanes gradients = spread.planes(geo, args.y, geo.group_out(), code, image_block, first, blocks);
    kernels.load(gradients, job.dy_box, geo.out, dy);
    for (int64_t b = 0; b < blocks && bias(); ++b)
      kernels.sum(dy + b * y_count * vector_bytes, geo.group_out(), y_pixels,
                  sums + b * sum_vectors * vector_bytes + bias_at, f64());
    if (x_count == 0) continue;
    kernels.load(spread.planes(geo, args.x, geo.group_in(), code, image_block, first, blocks), job.x_box, geo.in, x);
    if (code.round) {
      code.round(reinterpret_cast<float*>(dy), blocks * y_count * spread.lanes);
      code.round(reinterpret_cast<float*>(x), blocks * x_count * spread.lanes);
    }
    const bool padded = job.x_box.first[2] < 0 || job.x_box.first[2] + xe[2] > geo.in[2];
    for (int64_t b = 0; b < blocks; ++b) {
      job.x = x + b * x_count * vector_bytes;
      job.dy = dy + b * y_count * vector_bytes;
      job.sums = sums + b * sum_vectors * vector_bytes;
      job.dy_finite = !padded || kernels.finite(job.dy, y_count, f64());
      kernels.weight_grad(job, f64());
    }
  }
}

// Adds the sums of all chunks in order, then the images that share a vector, and writes the result.
template <typename T>
void WeightPlan::finish(const Arguments& args, int64_t block, char* sums) const {
  const Geometry& geo = problem.geo;
  const int64_t L = spread.lanes, taps = geo.taps();
  T* total = reinterpret_cast<T*>(sums + block * sum_vectors * problem.isa->vector_bytes);
  for (int64_t c = 1; c < chunks; ++c) {
    const T* part = total + c * spread.weight_blocks * sum_vectors * L;
    for (int64_t i = 0; i < sum_vectors * L; ++i) total[i] += part[i];
  }
  const int here = int(spread.images > 1 ? geo.G : L);  // lanes that are different groups
  for (int64_t i = 0; i < sum_vectors && spread.images > 1; ++i)
    for (int64_t image = 1; image < spread.images; ++image)
      for (int64_t g = 0; g < geo.G; ++g) total[i * L + g] += total[i * L + image * geo.G + g];

  const ElementCode code = result_code(problem);
  std::vector<T> line(std::max(taps, geo.group_out()));
  for (int lane = 0; lane < here; ++lane) {
    const int64_t group = spread.group_of(geo, block, lane), first = group * geo.group_out();
    if (group < 0) continue;
    const T* from = total + lane;
    for (int64_t k = 0; k < geo.group_out(); ++k)
      for (int64_t c = 0; c < geo.group_in(); ++c) {
        for (int64_t tap = 0; tap < taps; ++tap, from += L) line[tap] = *from;
        write_taps(geo, args.w, args.w.data + (first + k) * args.w.stride[axis_o] + c * args.w.stride[axis_i], code,
                   line.data());
      }
    if (!bias()) continue;
    for (int64_t k = 0; k < geo.group_out(); ++k, from += L) line[k] = *from;
    char* to = args.db.data + first * args.db.stride[0];
    if constexpr (sizeof(T) == 8) code.encode64(line.data(), geo.group_out(), to, args.db.stride[0]);
    else code.encode(line.data(), geo.group_out(), to, args.db.stride[0]);
  }
}

// The weights of one unit of groups, [output channel][tap][lane].
void WeightPlan::write_groups(const Arguments& args, int64_t u, const float* total) const {
  const Geometry& geo = problem.geo;
  const ElementCode code = result_code(problem);
  const int64_t taps = geo.taps(), L = units.lanes, in = geo.group_in(), out = geo.group_out();
  const int64_t bytes = size_of(problem.out_dtype), *w = args.w.stride;
  const bool dense = w[axis_w] == bytes && w[axis_h] == geo.kernel[2] * bytes && in >= L &&
                     w[axis_d] == geo.kernel[1] * geo.kernel[2] * bytes && w[axis_i] == taps * bytes;
  std::vector<float> lines(L * taps);
  for (int64_t o = 0; o < out; ++o, total += taps * L) {
    for (int64_t tap = 0; tap < taps; ++tap)
      for (int64_t lane = 0; lane < L; ++lane) lines[lane * taps + tap] = total[tap * L + lane];
    for (int64_t lane = 0; lane < (dense ? 1 : L); ++lane) {
      const int64_t channel = u * L + lane, group = channel / in;
      char* at = args.w.data + (group * out + o) * w[axis_o] + channel % in * w[axis_i];
      if (dense) code.encode(lines.data(), L * taps, at, bytes);
      else write_taps(geo, args.w, at, code, lines.data() + lane * taps);
    }
  }
}

// Every chunk of boxes has sums of its own; they are added in order.
void WeightPlan::run_direct(const Arguments& args) const {
  const Geometry& geo = problem.geo;
  const int64_t entries = direct_entries(), chunk_floats = units.units() * entries, unit = units.unit();
  const int64_t tall = divide_up(geo.out[1], direct_rows), wide = divide_up(geo.out[2], direct_pixels);
  float* sums = reinterpret_cast<float*>(args.workspace);
  char* scratch = args.workspace + up_to_multiple(direct_bytes(), 64);
  parallel_for(direct_chunks * direct_splits, args.threads, [&](int64_t task, int slot) {
    const int64_t index = task / direct_splits, split = task % direct_splits;
    DirectWeightGrad job{};
    job.first_unit = units.units() * split / direct_splits;
    job.unit_count = units.units() * (split + 1) / direct_splits - job.first_unit;
    job.units = units;
    job.geo = &geo;
    job.x_stride = args.x.stride;
    job.dy_stride = args.y.stride;
    job.full_rows = direct_rows;
    job.bias = bias();
    job.sums = sums + index * chunk_floats;
    if (gathers()) job.gathered = scratch + slot * scratch_bytes;
    std::fill_n(job.sums + job.first_unit * entries, job.unit_count * entries, 0.0f);
    for (int64_t i = direct_boxes() * index / direct_chunks; i < direct_boxes() * (index + 1) / direct_chunks; ++i) {
      const int64_t image = i / wide / tall / geo.out[0];  // planes go fast: they read each other's inputs
      job.x = args.x.data + image * args.x.stride[axis_n];
      job.dy = args.y.data + image * args.y.stride[axis_n];
      job.z = i / wide % geo.out[0];
      job.first = i / wide / geo.out[0] % tall * direct_rows;
      job.rows = std::min(direct_rows, geo.out[1] - job.first);
      job.first_pixel = i % wide * direct_pixels;
      const int next = wide > 1 ? axis_w : geo.out[0] > 1 ? axis_d : tall > 1 ? axis_h : axis_n;
      const int64_t step = next == axis_w ? direct_pixels : next == axis_h ? direct_rows : 1;
      job.dy_ahead = step * args.y.stride[next];
      job.x_ahead = step * args.x.stride[next] * (next == axis_n ? 1 : geo.stride[next - axis_d]);
      job.pixels = std::min(direct_pixels, geo.out[2] - job.first_pixel);
      kernels.direct_weight(job);
    }
  });
  const ElementCode code = result_code(problem);
  parallel_for(units.units(), args.threads, [&](int64_t u, int) {
    float* total = sums + u * entries;
    for (int64_t c = 1; c < direct_chunks; ++c)
      for (int64_t i = 0; i < entries; ++i) total[i] += total[c * chunk_floats + i];
    if (units.group_to) return write_groups(args, u, total);
    std::vector<float> line(geo.taps());
    for (int64_t c = 0; c < unit; ++c) {
      const int64_t channel = units.first(u) + c;
      const float* from = total + units.place(c);
      for (int64_t tap = 0; tap < geo.taps(); ++tap) line[tap] = from[tap * unit];
      // NOTE: channels of two units are written by the first of them only: units are finished side by side.
      if (u > 0 && channel < units.first(u - 1) + unit) continue;
      write_taps(geo, args.w, args.w.data + channel * args.w.stride[axis_o], code, line.data());
      if (bias()) code.encode(from + geo.taps() * unit, 1, args.db.data + channel * args.db.stride[0], 0);
    }
  });
}

// Every channel of every image is a line; a task has all images of its channels, in order.
void WeightPlan::run_lines(const Arguments& args) const {
  const Geometry& geo = problem.geo;
  const int64_t entries = geo.taps() + bias(), pieces = std::min<int64_t>(geo.C, 4 * tasks_wanted);
  float* sums = reinterpret_cast<float*>(args.workspace);
  char* scratch = args.workspace + up_to_multiple(geo.C * entries * 4, 64);
  const ElementCode code = result_code(problem);
  parallel_for(pieces, args.threads, [&](int64_t piece, int slot) {
    const int64_t first = geo.C * piece / pieces, last = geo.C * (piece + 1) / pieces;
    LineWeightGrad job{operand_code(problem), nullptr, nullptr, args.x.stride[axis_c], args.y.stride[axis_c],
                       last - first, geo.in[2], geo.out[2], geo.taps(), geo.dilation[2], geo.pad[2], bias(),
                       sums + first * entries, reinterpret_cast<float*>(scratch + slot * line_bytes())};
    std::fill_n(job.sums, job.lines * entries, 0.0f);
    for (int64_t image = 0; image < geo.N; ++image) {
      job.x = args.x.data + image * args.x.stride[axis_n] + first * args.x.stride[axis_c];
      job.dy = args.y.data + image * args.y.stride[axis_n] + first * args.y.stride[axis_c];
      kernels.line_weight(job);
    }
    for (int64_t c = first; c < last; ++c) {
      write_taps(geo, args.w, args.w.data + c * args.w.stride[axis_o], code, sums + c * entries);
      if (bias()) code.encode(sums + c * entries + geo.taps(), 1, args.db.data + c * args.db.stride[0], 0);
    }
  });
}

void WeightPlan::run(const Arguments& args) const {
  const int64_t bytes = size_of(problem.dtype);
  if (lines && args.x.stride[axis_w] == bytes && args.y.stride[axis_w] == bytes) return run_lines(args);
  if (direct && direct_fits(units, args.x, args.y)) return run_direct(args);
  const int64_t sum_bytes = sum_vectors * problem.isa->vector_bytes, blocks = spread.weight_blocks;
  char* scratch = args.workspace + chunks * blocks * sum_bytes;
  const int64_t wide_blocks = divide_up(blocks, together);
  parallel_for(chunks * wide_blocks, args.threads, [&](int64_t task, int slot) {
    const int64_t index = task / wide_blocks, first = task % wide_blocks * together;
    chunk(args, first, index, args.workspace + (index * blocks + first) * sum_bytes, scratch + slot * scratch_bytes);
  });
  parallel_for(blocks, args.threads, [&](int64_t block, int) {
    if (f64()) finish<double>(args, block, args.workspace);
    else finish<float>(args, block, args.workspace);
  });
}

}  // namespace

std::optional<Plan> plan_grouped_weight(const Problem& problem, std::string& why_not) {
  auto p = std::make_shared<WeightPlan>(problem);
  const Geometry& geo = p->problem.geo;
  const LaneWay reach{&geo, false};
  const int64_t vector_bytes = problem.isa->vector_bytes, blocks = p->spread.weight_blocks;
  const auto dy_vectors = [&](const int64_t* e) { return geo.group_out() * e[0] * e[1] * e[2]; };
  const auto x_vectors = [&](const int64_t* e) {
    return geo.group_in() * reach.source_extent(0, e[0]) * reach.source_extent(1, e[1]) * reach.source_extent(2, e[2]);
  };
  p->sum_vectors = geo.group_out() * geo.group_in() * geo.taps() + (p->bias() ? geo.group_out() : 0);
  int64_t limit = l2_bytes / 2 / vector_bytes, shared = 0, tasks = tasks_wanted;
  for (;;) {
    const int64_t channels = std::min(geo.group_in(), geo.group_out());
    const LaneCut cut = choose_lane_cut(problem, p->spread, problem.x_nominal, channels, geo.out, limit,
                                        [&](const int64_t* e) { return dy_vectors(e) + x_vectors(e); });
    p->cut = cut.boxes;
    p->together = cut.together;
    const int64_t chunks_wanted = divide_up(tasks, divide_up(blocks, p->together));
    p->x_vectors = x_vectors(p->cut.extent);
    p->dy_vectors = dy_vectors(p->cut.extent);
    p->scratch_bytes = up_to_multiple(p->together * (p->x_vectors + p->dy_vectors) * vector_bytes, 64);
    p->chunks = std::min(chunks_wanted, p->items());
    shared = p->chunks * blocks * p->sum_vectors * vector_bytes;
    if (shared + p->scratch_bytes <= problem.max_workspace || (limit <= 1 && tasks == 1)) break;
    tasks = divide_up(tasks, 2);
    limit = std::max<int64_t>(1, limit / 2);
  }
  const int64_t bytes = size_of(problem.dtype);
  const int64_t gathered = p->gathers() ? p->gathered_bytes() : 0;
  if (p->direct &&
      std::max(shared, p->direct_bytes()) + std::max(p->scratch_bytes, gathered) + 64 > problem.max_workspace)
    p->direct = false;
  if (p->direct) {
    shared = std::max(shared, up_to_multiple(p->direct_bytes(), 64));
    p->scratch_bytes = std::max(p->scratch_bytes, gathered);
  }
  const int64_t line_sums = up_to_multiple(geo.C * (geo.taps() + p->bias()) * 4, 64);
  if (p->lines && std::max(shared, line_sums) + std::max(p->scratch_bytes, p->line_bytes()) > problem.max_workspace)
    p->lines = false;
  if (p->lines) {
    shared = std::max(shared, line_sums);
    p->scratch_bytes = std::max(p->scratch_bytes, p->line_bytes());
  }
  const bool lines = p->lines && problem.x_nominal[axis_w] == bytes && problem.y_nominal[axis_w] == bytes;
  const bool direct = p->direct && problem.x_nominal[axis_c] == bytes && problem.y_nominal[axis_c] == bytes;
  const double boxes = double(p->items()) * blocks;
  double cycles =
      boxes * (p->dy_vectors * double(geo.group_in() * geo.taps()) * landing_share(geo) * cycles_per_product +
               p->x_vectors * lane_move_cycles(problem.x_nominal, bytes, geo.group_in(), p->spread) +
               p->dy_vectors * lane_move_cycles(problem.y_nominal, bytes, geo.group_out(), p->spread)) +
      double(p->chunks) * blocks * p->sum_vectors * 3 + lane_weight_cycles(geo) +
      boxes * p->sum_vectors * (p->sum_vectors * vector_bytes > l2_bytes / 2 ? 15 : 2);
  const bool bf16 = problem.dtype == Dtype::bf16;
  // Cycles per product and per vector of sums, measured on Zen 4.
  const double group_cycles = p->gathers() ? (geo.taps() > 1 ? (bf16 ? 0.7 : 1.2) : (bf16 ? 0.9 : 1.6))
                                           : geo.taps() > 1 ? (bf16 ? 1.0 : 1.5) : (bf16 ? 1.6 : 1.8);
  const double sum_cycles = p->gathers() ? 6.0 * p->direct_boxes() + 3.0 * p->direct_chunks + 20
                                         : 3.0 * (p->direct_boxes() + p->direct_chunks);
  if (direct && p->units.group_to)
    cycles = 0.83 * double(geo.N) * geo.out_pixels() * p->units.units() * geo.group_out() * geo.taps() *
                 landing_share(geo) * group_cycles * (p->direct_entries() * 4 > 64 << 10 ? 1.25 : 1) +
             sum_cycles * p->units.units() * p->direct_entries() / 16;
  else if (direct)
    cycles = double(geo.N) * geo.out_pixels() * blocks * (geo.taps() * landing_share(geo) * cycles_per_product + 2) +
             double(p->direct_boxes()) * blocks * geo.taps() * 3 + lane_weight_cycles(geo);
  if (lines) cycles = double(geo.N) * geo.C * (divide_up(geo.out[2], 16) * (2.5 * geo.taps() + 4) + 40 * geo.taps());
  const double moved = double(geo.N) * (geo.C * geo.in_pixels() + geo.K * geo.out_pixels()) * bytes;

  Plan plan;
  plan.kernel = std::string(geo.group_in() == 1 ? "depthwise" : "grouped") + 
                (direct ? "_direct_weight_" : lines ? "_line_weight_" : "_weight_") +
                (p->f64() ? "f64_" : direct && p->units.group_to && problem.dtype == Dtype::bf16 ? "bf16_" : "f32_") +
                std::to_string(p->spread.lanes) + "lanes_" + compiled_level(problem.isa->level);
  if (direct || lines) plan.doubt = 1;  // nothing but products and memory to estimate
  if (!fit_workspace(plan, problem, shared, p->scratch_bytes, std::max(cycles, moved * cycles_per_byte), why_not))
    return std::nullopt;
  char note[256];
  std::snprintf(note, sizeof note, "%lld chunks of %lld boxes of %lldx%lldx%lld output pixels, %lld vectors held",
                (long long)p->chunks, (long long)p->items(), (long long)p->cut.extent[0], (long long)p->cut.extent[1],
                (long long)p->cut.extent[2], (long long)(p->x_vectors + p->dy_vectors));
  plan.notes.push_back(note);
  plan.run = [p](const Arguments& args) { p->run(args); };
  return plan;
}

}  // namespace convgrad
