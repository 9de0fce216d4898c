// Weight gradient (with the bias gradient in the same pass) of few-channel convolutions; see few.h.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "few.h"
#include "threads.h"

namespace convgrad {
namespace {

constexpr double cycles_per_byte = 0.25;  // of memory, one core
constexpr int64_t tasks_wanted = 16, pixels_wanted = 256;

template <typename T>
bool finite_plain(const T* line, int64_t n) {
  T zero[16] = {};
  for (int64_t i = 0; i < n; ++i) zero[i % 16] += line[i] * T(0);
  for (T z : zero)
    if (z != 0) return false;
  return true;
}

template <typename T>
T sum_plain(const T* line, int64_t n) {
  T part[16] = {}, sum = 0;
  for (int64_t i = 0; i < n; ++i) part[i % 16] += line[i];
  for (T p : part) sum += p;
  return sum;
}

// Items are (images, box) pairs; a chunk is a range of items summed by one task. A task has one group, a range of
// blocks of the many channels and one chunk. All of this, and so the bits of the result, depend on the problem alone.
struct FewWeightPlan {
  Problem problem;
  FewShape shape;
  LaneKernels kernels;
  BoxCut cut{};
  int64_t images, image_blocks, chunks = 1, splits = 1, sum_vectors, lane_bytes, plain_bytes, scratch_bytes;

  FewWeightPlan(const Problem& p, bool lanes_are_out)
      : problem(p), shape(p.geo, p.isa->vector_bytes / int(element_bytes()), lanes_are_out), kernels(p.isa->level) {
    const Geometry& g = problem.geo;
    // Small images go together, so that sums stay in registers over many pixels, as far as the cache holds them.
    const int64_t plain = shape.few * (lanes_are_out ? g.in_pixels() : g.out_pixels()) * element_bytes();
    const int64_t fit = std::max<int64_t>(1, l2_bytes / 4 / plain);
    images = g.out[0] == 1 ? std::min({g.N, divide_up(pixels_wanted, g.out_pixels()), fit}) : 1;
    image_blocks = divide_up(g.N, images);
    sum_vectors = shape.blocks * shape.few * g.taps() + (!bias() ? 0 : lanes_are_out ? shape.blocks : shape.few);
  }
  FewWeightPlan(const FewWeightPlan&) = delete;

  int64_t element_bytes() const { return problem.dtype == Dtype::f64 ? 8 : 4; }
  bool f64() const { return problem.dtype == Dtype::f64; }
  bool bias() const { return problem.wrt & wrt_bias; }
  int64_t items() const { return image_blocks * cut.boxes(); }
  // Splits start at multiples of a tile's four blocks.
  int64_t split_first(int64_t split) const {
    return std::min(shape.blocks, 4 * (divide_up(shape.blocks, 4) * split / splits));
  }
  int64_t split_blocks() const { return std::min(shape.blocks, 4 * divide_up(divide_up(shape.blocks, 4), splits)); }
  int64_t product_vectors() const { return shape.blocks * shape.few * problem.geo.taps(); }

  int64_t x_pixels(const int64_t* extent) const {
    const LaneWay reach{&problem.geo, false};
    return reach.source_extent(0, extent[0]) * reach.source_extent(1, extent[1]) * reach.source_extent(2, extent[2]);
  }
  int64_t lane_vectors(const int64_t* e) const {
    return images * split_blocks() * (shape.lanes_are_out ? e[0] * e[1] * e[2] : x_pixels(e));
  }
  int64_t plain_elements(const int64_t* e) const {
    return images * shape.few * (shape.lanes_are_out ? x_pixels(e) : e[0] * e[1] * e[2]);
  }

  void choose_boxes();
  double cycles() const;
  int64_t sum_bytes() const { return chunks * problem.geo.G * sum_vectors * problem.isa->vector_bytes; }
  template <typename T>
  void chunk(const Arguments& args, int64_t group, int64_t split, int64_t index, T* sums, char* scratch) const;
  template <typename T>
  void finish(const Arguments& args, int64_t group, T* sums) const;
  void run(const Arguments& args) const;
};

template <typename T>
void FewWeightPlan::chunk(const Arguments& args, int64_t group, int64_t split, int64_t index, T* sums,
                          char* scratch) const {
  const Geometry& geo = problem.geo;
  const ElementCode code = operand_code(problem);
  const bool out = shape.lanes_are_out;
  const int64_t L = shape.lanes, first = split_first(split), blocks = split_first(split + 1) - first;
  const int64_t pair = geo.taps() * L;  // elements of the sums of one block and one of the few channels
  const Tensor &many = out ? args.y : args.x, &few = out ? args.x : args.y;
  T *lanes = reinterpret_cast<T*>(scratch), *plain = reinterpret_cast<T*>(scratch + lane_bytes);
  // Where lanes are output channels the sums of a split lie together; otherwise few output channels each have a piece.
  T* bias_sums = sums + product_vectors() * L + (out ? first * L : 0);
  if (out) {
    std::fill_n(sums + first * shape.few * pair, blocks * shape.few * pair, T(0));
  } else {
    for (int64_t f = 0; f < shape.few; ++f) std::fill_n(sums + (f * shape.blocks + first) * pair, blocks * pair, T(0));
  }
  const bool sum_bias = bias() && (out || split == 0);
  if (sum_bias) std::fill_n(bias_sums, (out ? blocks : shape.few) * L, T(0));

  for (int64_t item = items() * index / chunks; item < items() * (index + 1) / chunks; ++item) {
    const int64_t image = item / cut.boxes() * images, here = std::min(images, geo.N - image);
    LaneWeightGrad job{};
    job.geo = &geo;
    job.dy_box = cut.box(item % cut.boxes(), geo.out);
    job.x_box = input_box(geo, job.dy_box);
    const int64_t *xe = job.x_box.extent, *ye = job.dy_box.extent;
    const int64_t x_count = xe[0] * xe[1] * xe[2], y_count = ye[0] * ye[1] * ye[2];
    const PixelBox &lane_box = out ? job.dy_box : job.x_box, &plain_box = out ? job.x_box : job.dy_box;
    const int64_t lane_image = blocks * (out ? y_count : x_count) * L;
    const int64_t plain_image = shape.few * (out ? x_count : y_count);
    for (int64_t i = 0; i < here; ++i) {
      const LanePlanes planes =
          channel_planes(many, image + i, group * shape.many, shape.many, int(L), first, blocks, code);
      kernels.load(planes, lane_box, out ? geo.out : geo.in, lanes + i * lane_image);
      if (sum_bias && out) kernels.sum(lanes + i * lane_image, blocks, y_count, bias_sums, f64());
      if constexpr (sizeof(T) == 4)
        if (code.round) code.round(lanes + i * lane_image, lane_image);
      if (sum_bias && !out) {
        ElementCode exact = code;
        exact.round = nullptr;
        load_plain(few, image + i, group * shape.few, shape.few, plain_box, geo.out, exact, plain + i * plain_image);
        for (int64_t f = 0; f < shape.few; ++f)
          bias_sums[f * L] += sum_plain(plain + i * plain_image + f * y_count, y_count);
      }
      if (!(sum_bias && !out) || code.round)
        load_plain(few, image + i, group * shape.few, shape.few, plain_box, out ? geo.in : geo.out, code,
                   plain + i * plain_image);
    }
    if (x_count == 0) continue;
    const bool padded = job.x_box.first[2] < 0 || job.x_box.first[2] + xe[2] > geo.in[2];
    job.dy_finite = !padded || (out ? kernels.finite(lanes, here * lane_image / L, f64())
                                    : finite_plain(plain, here * plain_image));
    job.x = out ? plain : lanes;
    job.dy = out ? lanes : plain;
    job.x_broadcast = out;
    job.dy_broadcast = !out;
    job.images = here;
    job.x_image = out ? plain_image : lane_image;
    job.dy_image = out ? lane_image : plain_image;
    job.out_parts = out ? blocks : shape.few;
    job.in_parts = out ? shape.few : blocks;
    job.sum_step = out ? shape.few : shape.blocks;
    job.sums = sums + (out ? first * shape.few : first) * pair;
    kernels.weight_grad(job, f64());
  }
}

// Adds the sums of all chunks in order and writes the weights of one group.
template <typename T>
void FewWeightPlan::finish(const Arguments& args, int64_t group, T* sums) const {
  const Geometry& geo = problem.geo;
  const int64_t L = shape.lanes, taps = geo.taps();
  for (int64_t c = 1; c < chunks; ++c) {
    const T* part = sums + c * geo.G * sum_vectors * L;
    for (int64_t i = 0; i < sum_vectors * L; ++i) sums[i] += part[i];
  }
  const ElementCode code = result_code(problem);
  std::vector<T> line(std::max(taps, geo.group_out()));
  for (int64_t m = 0; m < shape.many; ++m)
    for (int64_t f = 0; f < shape.few; ++f) {
      const int64_t block = m / L, pair = shape.lanes_are_out ? block * shape.few + f : f * shape.blocks + block;
      const T* from = sums + pair * taps * L + m % L;
      for (int64_t tap = 0; tap < taps; ++tap, from += L) line[tap] = *from;
      write_taps(geo, args.w, args.w.data + shape.weight_offset(geo, args.w, group, m, f), code, line.data());
    }
  if (!bias()) return;
  const T* from = sums + product_vectors() * L;
  for (int64_t k = 0; k < geo.group_out(); ++k) line[k] = from[shape.lanes_are_out ? k : k * L];
  char* to = args.db.data + group * geo.group_out() * args.db.stride[0];
  if constexpr (sizeof(T) == 8) code.encode64(line.data(), geo.group_out(), to, args.db.stride[0]);
  else code.encode(line.data(), geo.group_out(), to, args.db.stride[0]);
}

void FewWeightPlan::run(const Arguments& args) const {
  const int64_t groups = problem.geo.G, group_bytes = sum_vectors * problem.isa->vector_bytes;
  char* scratch = args.workspace + sum_bytes();
  parallel_for(chunks * groups * splits, args.threads, [&](int64_t task, int slot) {
    const int64_t split = task % splits, group = task / splits % groups, index = task / splits / groups;
    char *sums = args.workspace + (index * groups + group) * group_bytes, *mine = scratch + slot * scratch_bytes;
    if (f64()) chunk(args, group, split, index, reinterpret_cast<double*>(sums), mine);
    else chunk(args, group, split, index, reinterpret_cast<float*>(sums), mine);
  });
  parallel_for(groups, args.threads, [&](int64_t group, int) {
    char* sums = args.workspace + group * group_bytes;
    if (f64()) finish(args, group, reinterpret_cast<double*>(sums));
    else finish(args, group, reinterpret_cast<float*>(sums));
  });
}

void FewWeightPlan::choose_boxes() {
  const Geometry& geo = problem.geo;
  const int64_t vector_bytes = problem.isa->vector_bytes;
  // Splits share the work without sums of their own; each has two tiles of four blocks or more.
  splits = std::clamp<int64_t>(divide_up(tasks_wanted, geo.G), 1, divide_up(shape.blocks, 8));
  int64_t chunks_wanted = divide_up(tasks_wanted, geo.G * splits);
  for (int64_t limit = l2_bytes / 2 / vector_bytes;;) {
    cut = choose_box(geo.out, geo.G * splits * image_blocks, limit, [&](const int64_t* e) {
      return lane_vectors(e) + divide_up(plain_elements(e), shape.lanes);
    });
    chunks = std::min(chunks_wanted, items());
    lane_bytes = up_to_multiple(lane_vectors(cut.extent) * vector_bytes, 64);
    plain_bytes = up_to_multiple(plain_elements(cut.extent) * element_bytes(), 64);
    scratch_bytes = lane_bytes + plain_bytes;
    if (sum_bytes() + scratch_bytes <= problem.max_workspace) return;
    if (limit <= 1 && chunks_wanted == 1 && images == 1) return;
    limit = std::max<int64_t>(1, limit / 2);
    chunks_wanted = divide_up(chunks_wanted, 2);
    images = divide_up(images, 2);
    image_blocks = divide_up(geo.N, images);
  }
}

double FewWeightPlan::cycles() const {
  const Geometry& geo = problem.geo;
  const double pixels = double(geo.N) * geo.G * geo.out_pixels();
  const double parts = std::min<double>(4, double(shape.lanes_are_out ? shape.blocks : shape.few));
  const double terms = std::min<double>(8, double(geo.kernel[2])) * (geo.kernel[1] > 1 ? 2 : 1);
  const double sums = std::min(24.0, parts * terms);
  const double per_product = std::max({1.0, (parts + sums / parts) / sums, 4.0 / sums}) + 0.18;
  const double products = pixels * shape.blocks * shape.few * geo.taps() * per_product * landing_share(geo);
  const double boxes = double(items()) * geo.G;
  const int64_t bytes = size_of(problem.dtype);
  const int64_t* nominal = shape.lanes_are_out ? problem.y_nominal : problem.x_nominal;
  const int64_t* plain_nominal = shape.lanes_are_out ? problem.x_nominal : problem.y_nominal;
  const LaneSpread one_image(Geometry{1, 64, 64, 64, {}, {}, {}, {}, {}, {}}, shape.lanes);
  const double moves = boxes * splits * lane_vectors(cut.extent) * lane_move_cycles(nominal, bytes, 1, one_image) +
                       boxes * splits * plain_elements(cut.extent) * (plain_nominal[axis_w] == bytes ? 1 : 3);
  const double updates = boxes * product_vectors() * 2.0 + double(chunks) * geo.G * sum_vectors * 3 +
                         lane_weight_cycles(geo);
  const double moved = double(geo.N) * (geo.C * geo.in_pixels() + geo.K * geo.out_pixels()) * bytes;
  // NOTE: fitted to thirteen layers on Zen 4, whose times were between 0.7 and 1.1 of the plain sum.
  return std::max(0.75 * products + 0.7 * moves + updates, moved * cycles_per_byte);
}

std::optional<Plan> plan_one(const Problem& problem, bool lanes_are_out, std::string& why_not) {
  auto p = std::make_shared<FewWeightPlan>(problem, lanes_are_out);
  p->choose_boxes();
  Plan plan;
  if (!fit_workspace(plan, problem, p->sum_bytes(), p->scratch_bytes, p->cycles(), why_not)) return std::nullopt;
  plan.doubt = problem.dtype == Dtype::bf16 ? 1.19 : 1.1;  // the dense family has bf16 products, this one none
  plan.kernel = std::string("few_weight_") + (lanes_are_out ? "out_" : "in_") + (p->f64() ? "f64_" : "f32_") +
                std::to_string(p->shape.lanes) + "lanes_" + compiled_level(problem.isa->level);
  char note[256];
  std::snprintf(note, sizeof note,
                "%lld chunks of %lld boxes of %lldx%lldx%lld output pixels, %lld images at once, %lld splits",
                (long long)p->chunks, (long long)p->items(), (long long)p->cut.extent[0], (long long)p->cut.extent[1],
                (long long)p->cut.extent[2], (long long)p->images, (long long)p->splits);
  plan.notes.push_back(note);
  plan.run = [p](const Arguments& args) { p->run(args); };
  return plan;
}

}  // namespace

std::optional<Plan> plan_few_weight(const Problem& problem, std::string& why_not) {
  const auto out = plan_one(problem, true, why_not), in = plan_one(problem, false, why_not);
  if (!out) return in;
  return in && in->seconds < out->seconds ? in : out;
}

}  // namespace convgrad
