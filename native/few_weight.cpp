// Weight gradient (with the bias gradient in the same pass) of few-channel convolutions; see few.h.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "bias.h"
#include "direct.h"
#include "few.h"
#include "few_pairs.h"
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
  if (n > 2048) return sum_plain(line, n / 2) + sum_plain(line + n / 2, n - n / 2);  // no long chain of roundings
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
  bool pairs, shared = false;    // bf16 pixels meet in pairs; two taps share the lanes of eight channels
  std::vector<int64_t> columns;  // the first tap of each column, see few_pairs.h
  int64_t dy_pair_bytes = 0, x_pair_bytes = 0;

  FewWeightPlan(const Problem& p, bool lanes_are_out)
      : problem(p), shape(p.geo, p.isa->vector_bytes / int(element_bytes()), lanes_are_out), kernels(p.isa->level) {
    const Geometry& g = problem.geo;
    // Small images go together, so that sums stay in registers over many pixels, as far as the cache holds them.
    const int64_t plain = shape.few * (lanes_are_out ? g.in_pixels() : g.out_pixels()) * element_bytes();
    const int64_t fit = std::max<int64_t>(1, l2_bytes / 4 / plain);
    images = g.out[0] == 1 ? std::min({g.N, divide_up(pixels_wanted, g.out_pixels()), fit}) : 1;
    image_blocks = divide_up(g.N, images);
    pairs = bf16_pairs(p) && lanes_are_out;
    shared = pairs && shape.many <= shape.lanes / 2 && g.dilation[2] == 1;
    for (int64_t s = 0; s < g.kernel[2]; ++s)
      if (!shared || s / g.stride[2] % 2 == 0) columns.push_back(s);
    sum_vectors = product_vectors() + bias_vectors() + (shared ? pair_vectors() : 0);
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
  int64_t bias_vectors() const { return !bias() ? 0 : shape.lanes_are_out ? shape.blocks : shape.few; }
  // Where taps share lanes the sums have another order than those of the other kernels, and a place of their own.
  int64_t pair_vectors() const { return product_vectors() / problem.geo.kernel[2] * int64_t(columns.size()); }
  int64_t dy_pairs(int64_t width) const { return divide_up(width + shared, 2); }
  int64_t x_places(int64_t width) const {
    const Geometry& g = problem.geo;
    return 2 * dy_pairs(width) + (g.kernel[2] - 1) * g.dilation[2] / g.stride[2];
  }
  int64_t x_words(int64_t width) const {
    const Geometry& g = problem.geo;
    return 2 * (dy_pairs(width) - 1) * g.stride[2] + (g.kernel[2] - 1) * g.dilation[2] + 1;
  }

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
  bool pair_item(const Arguments& args, int64_t group, int64_t first, int64_t blocks, LaneWeightGrad& job,
                 int64_t image, float* sums, char* scratch) const;
  template <typename T>
  void chunk(const Arguments& args, int64_t group, int64_t split, int64_t index, T* sums, char* scratch) const;
  template <typename T>
  void add_shared(const T* sums, int64_t f, int64_t m, T* line) const;
  template <typename T>
  void finish(const Arguments& args, int64_t group, int64_t block, T* sums) const;
  void run(const Arguments& args) const;
};

// The products of one item by pairs; false where Inf or NaN would meet what stands for pixels beside the tensors. With
// a bias gradient the lanes of dy are in `scratch` already.
bool FewWeightPlan::pair_item(const Arguments& args, int64_t group, int64_t first, int64_t blocks, LaneWeightGrad& job,
                              int64_t image, float* sums, char* scratch) const {
#if defined(__x86_64__)
  const Geometry& geo = problem.geo;
  const ElementCode code = operand_code(problem);
  const int64_t *xe = job.x_box.extent, *ye = job.dy_box.extent, L = shape.lanes, y_rows = ye[0] * ye[1];
  const int64_t dy_line = dy_pairs(ye[2]), places = x_places(ye[2]);
  float* lanes = reinterpret_cast<float*>(scratch);
  uint32_t* dy = reinterpret_cast<uint32_t*>(scratch + lane_bytes + plain_bytes);
  uint16_t* x = reinterpret_cast<uint16_t*>(scratch + lane_bytes + plain_bytes + dy_pair_bytes);
  const int64_t dy_block = y_rows * dy_line * L, x_rows = xe[0] * xe[1];
  // The elements of x are halves of words.
  const bool words = args.x.stride[axis_c] == 2;
  job.x_line = words ? x_words(ye[2]) * shape.few * 2 : places * geo.stride[2];
  job.x_part = words ? 2 : x_rows * job.x_line;
  job.x_step = words ? 2 * geo.stride[2] * shape.few * 2 : 2;
  const int64_t x_image = x_rows * job.x_line * (words ? 1 : shape.few);
  bool dy_finite = true, x_finite = true;
  for (int64_t i = 0; i < job.images; ++i) {
    const int64_t channel = group * shape.many + first * L;
    const char* y_at = args.y.data + (image + i) * args.y.stride[axis_n] + channel * args.y.stride[axis_c];
    float* image_lanes = lanes + i * blocks * y_rows * ye[2] * L;
    const bool direct = args.y.stride[axis_c] == 2 && !bias();
    if (!direct && !bias())
      kernels.load(channel_planes(args.y, image + i, group * shape.many, shape.many, int(L), first, blocks, code),
                   job.dy_box, geo.out, image_lanes);
    for (int64_t b = 0; b < blocks; ++b) {
      uint32_t* to = dy + (i * blocks + b) * dy_block;
      const int64_t channels = std::min(L, shape.many - (first + b) * L);
      const PairRows rows{y_at + b * L * 2, args.y.stride, &job.dy_box, geo.out};
      const float* block_lanes = image_lanes + b * y_rows * ye[2] * L;
      dy_finite &= direct ? avx512_bf16::pack_dy_pairs(rows, channels, shared, dy_line, to)
                          : avx512_bf16::pair_lanes(block_lanes, y_rows, ye[2], shared, dy_line, to);
    }
    const char* x_at = args.x.data + (image + i) * args.x.stride[axis_n] + group * shape.few * args.x.stride[axis_c];
    const PairRows rows{x_at, args.x.stride, &job.x_box, geo.in};
    if (words) {
      x_finite &= avx512_bf16::pack_x_words(rows, shape.few, geo.stride[2], x_words(ye[2]),
                                            reinterpret_cast<uint32_t*>(x + i * x_image));
      continue;
    }
    for (int64_t f = 0; f < shape.few; ++f) {
      const PairRows of_one{x_at + f * args.x.stride[axis_c], args.x.stride, &job.x_box, geo.in};
      x_finite &= avx512_bf16::pack_x_places(of_one, geo.stride[2], places, x + i * x_image + f * job.x_part);
    }
  }
  const bool padded = job.x_box.first[2] < 0 || job.x_box.first[2] + xe[2] > geo.in[2];
  if ((padded && !dy_finite) || (2 * dy_line > ye[2] && !x_finite)) return false;
  std::vector<int64_t> column;
  for (int64_t tap : columns) {
    const int64_t at = tap * geo.dilation[2];
    column.push_back(words ? at * shape.few * 2 : at % geo.stride[2] * places + at / geo.stride[2]);
  }
  job.dy_finite = true;
  job.x = x;
  job.dy = dy;
  job.x_broadcast = true;
  job.x_image = x_image;
  job.dy_image = blocks * dy_block;
  job.out_parts = blocks;
  job.in_parts = shape.few;
  job.sum_step = shape.few;
  job.dy_width = dy_line;
  job.columns = int64_t(column.size());
  job.column = column.data();
  job.sums = shared ? sums + (product_vectors() + bias_vectors()) * L : sums + first * shape.few * geo.taps() * L;
  avx512_bf16::weight_grad_pairs(job);
  return true;
#else
  return false;
#endif
}

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
  const bool together = out && few.stride[axis_c] == size_of(problem.dtype);  // channels stay beside each other
  int pair_shape[4] = {}, shape_of_tile[4] = {};
  std::vector<int64_t> column;
  for (int64_t s = 0; s < geo.kernel[2]; ++s) column.push_back(s * geo.dilation[2] * shape.few);
  // Where lanes are output channels the sums of a split lie together; otherwise few output channels each have a piece.
  T* bias_sums = sums + product_vectors() * L + (out ? first * L : 0);
  if (out) {
    std::fill_n(sums + first * shape.few * pair, blocks * shape.few * pair, T(0));
  } else {
    for (int64_t f = 0; f < shape.few; ++f) std::fill_n(sums + (f * shape.blocks + first) * pair, blocks * pair, T(0));
  }
  if (shared) std::fill_n(sums + (product_vectors() + bias_vectors()) * L, pair_vectors() * L, T(0));
  const bool sum_bias = bias() && (out || split == 0);
  const int64_t bias_terms = sum_bias ? (out ? blocks : shape.few) * L : 0;
  std::fill_n(bias_sums, bias_terms, T(0));
  BlockedTotals<T> totals(bias_sums, bias_terms);  // images of one pixel are many terms

  for (int64_t item = items() * index / chunks; item < items() * (index + 1) / chunks; ++item) {
    const int64_t image = item / cut.boxes() * images, here = std::min(images, geo.N - image);
    LaneWeightGrad job{};
    job.geo = &geo;
    job.shape = pairs ? pair_shape : shape_of_tile;
    job.dy_box = cut.box(item % cut.boxes(), geo.out);
    job.x_box = input_box(geo, job.dy_box);
    const int64_t *xe = job.x_box.extent, *ye = job.dy_box.extent;
    const int64_t x_count = xe[0] * xe[1] * xe[2], y_count = ye[0] * ye[1] * ye[2];
    const PixelBox &lane_box = out ? job.dy_box : job.x_box, &plain_box = out ? job.x_box : job.dy_box;
    const int64_t lane_image = blocks * (out ? y_count : x_count) * L;
    const int64_t plain_image = shape.few * (out ? x_count : y_count);
    job.images = here;
    if constexpr (sizeof(T) == 4)
      if (pairs && !bias() && x_count > 0 && pair_item(args, group, first, blocks, job, image, sums, scratch)) continue;
    for (int64_t i = 0; i < here; ++i) {
      const LanePlanes planes =
          channel_planes(many, image + i, group * shape.many, shape.many, int(L), first, blocks, code);
      kernels.load(planes, lane_box, out ? geo.out : geo.in, lanes + i * lane_image);
      if (sum_bias && out) kernels.sum(lanes + i * lane_image, blocks, y_count, totals.now(), f64());
      if constexpr (sizeof(T) == 4)
        if (code.round) code.round(lanes + i * lane_image, lane_image);
      if (sum_bias && !out) {
        ElementCode exact = code;
        exact.round = nullptr;
        load_plain(few, image + i, group * shape.few, shape.few, plain_box, geo.out, exact, plain + i * plain_image);
        for (int64_t f = 0; f < shape.few; ++f)
          totals.now()[f * L] += sum_plain(plain + i * plain_image + f * y_count, y_count);
      }
      if (sum_bias) totals.added(1);
      if (together)
        load_together(few, image + i, group * shape.few, shape.few, plain_box, geo.in, *problem.isa, code,
                      plain + i * plain_image);
      else if (!(sum_bias && !out) || code.round)
        load_plain(few, image + i, group * shape.few, shape.few, plain_box, out ? geo.in : geo.out, code,
                   plain + i * plain_image);
    }
    if (x_count == 0) continue;
    if constexpr (sizeof(T) == 4)
      if (pairs && bias() && pair_item(args, group, first, blocks, job, image, sums, scratch)) continue;
    const bool padded = job.x_box.first[2] < 0 || job.x_box.first[2] + xe[2] > geo.in[2];
    job.dy_finite = !padded || (out ? kernels.finite(lanes, here * lane_image / L, f64())
                                    : finite_plain(plain, here * plain_image));
    job.x_line = 0;
    job.shape = shape_of_tile;
    if (together) {
      job.x_line = xe[2] * shape.few;
      job.x_part = 1;
      job.x_step = geo.stride[2] * shape.few;
      job.columns = geo.kernel[2];
      job.column = column.data();
      job.dy_width = ye[2];
    }
    job.x = out ? plain : lanes;
    job.dy = out ? lanes : plain;
    job.x_broadcast = out;
    job.dy_broadcast = !out;
    job.x_image = out ? plain_image : lane_image;
    job.dy_image = out ? lane_image : plain_image;
    job.out_parts = out ? blocks : shape.few;
    job.in_parts = out ? shape.few : blocks;
    job.sum_step = out ? shape.few : shape.blocks;
    job.sums = sums + (out ? first * shape.few : first) * pair;
    kernels.weight_grad(job, f64());
  }
}

// The taps of channels m and f from sums whose lanes they share: the second of a column is a stride after the first.
template <typename T>
void FewWeightPlan::add_shared(const T* sums, int64_t f, int64_t m, T* line) const {
  const Geometry& geo = problem.geo;
  const int64_t L = shape.lanes, S = geo.kernel[2], stride = geo.stride[2], rows = geo.kernel[0] * geo.kernel[1];
  const T* from = sums + f * rows * int64_t(columns.size()) * L + m;
  for (int64_t row = 0; row < rows; ++row, line += S)
    for (int64_t tap : columns) {
      line[tap] += from[0];
      if (tap + stride < S) line[tap + stride] += from[L / 2];
      from += L;
    }
}

// Adds the sums of all chunks in order and writes the weights of one group and one block of the many channels, with the
// first one the rest.
template <typename T>
void FewWeightPlan::finish(const Arguments& args, int64_t group, int64_t block, T* sums) const {
  const Geometry& geo = problem.geo;
  const int64_t L = shape.lanes, taps = geo.taps();
  const auto add = [&](int64_t vector, int64_t count) {
    T* total = sums + vector * L;
    for (int64_t c = 1; c < chunks; ++c) {
      const T* part = total + c * geo.G * sum_vectors * L;
      for (int64_t i = 0; i < count * L; ++i) total[i] += part[i];
    }
  };
  const auto pair_of = [&](int64_t f) {
    return shape.lanes_are_out ? block * shape.few + f : f * shape.blocks + block;
  };
  for (int64_t f = 0; f < shape.few; ++f) add(pair_of(f) * taps, taps);
  if (block == 0) add(product_vectors(), sum_vectors - product_vectors());
  const ElementCode code = result_code(problem);
  std::vector<T> line(std::max(taps, geo.group_out()));
  for (int64_t m = block * L; m < std::min(shape.many, (block + 1) * L); ++m)
    for (int64_t f = 0; f < shape.few; ++f) {
      const T* from = sums + pair_of(f) * taps * L + m % L;
      for (int64_t tap = 0; tap < taps; ++tap, from += L) line[tap] = *from;
      if (shared) add_shared(sums + (product_vectors() + bias_vectors()) * L, f, m, line.data());
      write_taps(geo, args.w, args.w.data + shape.weight_offset(geo, args.w, group, m, f), code, line.data());
    }
  if (!bias() || block > 0) return;
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
  parallel_for(groups * shape.blocks, args.threads, [&](int64_t task, int) {
    const int64_t group = task / shape.blocks, block = task % shape.blocks;
    char* sums = args.workspace + group * group_bytes;
    if (f64()) finish(args, group, block, reinterpret_cast<double*>(sums));
    else finish(args, group, block, reinterpret_cast<float*>(sums));
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
    if (pairs) {
      const int64_t *e = cut.extent, rows = x_pixels(e) / LaneWay{&geo, false}.source_extent(2, e[2]);
      dy_pair_bytes = images * split_blocks() * e[0] * e[1] * dy_pairs(e[2]) * vector_bytes;
      const int64_t line = std::max(geo.stride[2] * x_places(e[2]) * 2, x_words(e[2]) * 4);
      x_pair_bytes = up_to_multiple(images * shape.few * rows * line, 64) + vector_bytes;
    }
    scratch_bytes = lane_bytes + plain_bytes + dy_pair_bytes + x_pair_bytes;
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
  const double lane_moves = boxes * splits * lane_vectors(cut.extent), lane_move =
      lane_move_cycles(nominal, bytes, 1, one_image);
  const double plain_moves = boxes * splits * plain_elements(cut.extent);
  const bool together = shape.lanes_are_out && plain_nominal[axis_c] == bytes;
  const double moves = lane_moves * lane_move + plain_moves * (plain_nominal[axis_w] == bytes || together ? 1 : 3);
  const double updates = boxes * product_vectors() * 2.0 + double(chunks) * geo.G * sum_vectors * 3 +
                         lane_weight_cycles(geo);
  const double moved = double(geo.N) * (geo.C * geo.in_pixels() + geo.K * geo.out_pixels()) * bytes;
  if (pairs) {
    const double width = double(dy_pairs(cut.extent[2]));
    // Words that a stride puts far apart come from the second-level cache.
    const double far = together && geo.stride[2] > 1 && 2 * geo.stride[2] * shape.few * 4 >= 256 ? 1.25 : 1;
    const double share = 0.42 * (1 + 3 / width) * double(columns.size()) / double(geo.kernel[2]) * far;
    const double packing = lane_moves * (nominal[axis_c] == bytes ? 2.5 : lane_move + 2) + plain_moves * 0.5;
    return std::max(0.85 * products * share + 0.7 * packing + updates, moved * cycles_per_byte);
  }
  // NOTE: fitted to thirteen layers on Zen 4, whose times were between 0.7 and 1.1 of the plain sum; hundreds of channels
  // (splits) took a seventh longer than the others.
  return std::max((0.75 * products + 0.7 * moves + updates) * (splits > 1 ? 1.15 : 1), moved * cycles_per_byte);
}

std::optional<Plan> plan_one(const Problem& problem, bool lanes_are_out, std::string& why_not) {
  auto p = std::make_shared<FewWeightPlan>(problem, lanes_are_out);
  p->choose_boxes();
  Plan plan;
  if (!fit_workspace(plan, problem, p->sum_bytes(), p->scratch_bytes, p->cycles(), why_not)) return std::nullopt;
  // Where the dense family has bf16 products and this one has none, it must be better by more.
  const bool groups = problem.geo.G > 1;
  plan.doubt = p->pairs ? (groups ? 1 : 1.22) : problem.dtype == Dtype::bf16 ? 1.19 : groups ? 1.13 : 1.1;
  plan.kernel = std::string("few_weight_") + (lanes_are_out ? "out_" : "in_") +
                (p->f64() ? "f64_" : p->pairs ? "bf16_" : "f32_") +
                std::to_string(p->shape.lanes) + "lanes_" +
                (p->pairs ? "avx512_bf16" : compiled_level(problem.isa->level));
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
