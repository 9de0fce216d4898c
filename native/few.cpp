// Few-channel convolutions: output and input gradient, planned and run; see few.h.
#include "few.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>

#include "direct.h"
#include "threads.h"

namespace convgrad {

static constexpr double cycles_per_byte = 0.25;  // of memory, one core
static constexpr int64_t cache_bytes = 16 << 20;  // results that move more are written around the caches
static constexpr int64_t most_images = 48;  // in a slab: several tiles of images share what is read of the weights

LanePlanes channel_planes(const Tensor& tensor, int64_t image, int64_t first_channel, int64_t channels, int lanes,
                          int64_t first_block, int64_t blocks, const ElementCode& code) {
  LanePlanes p{};
  p.data = tensor.data;
  p.stride = tensor.stride;
  p.code = code;
  p.channels = 1;
  p.blocks = blocks;
  p.planes = std::min(blocks * lanes, channels - first_block * lanes);
  p.lane_step = tensor.stride[axis_c];
  p.block_step = lanes * p.lane_step;
  for (int l = 0; l < lanes; ++l)
    p.offset[l] = image * tensor.stride[axis_n] + (first_channel + first_block * lanes + l) * p.lane_step;
  return p;
}

namespace {

template <typename T>
void load_plain_as(const Tensor& tensor, const char* from, int64_t channels, const PixelBox& box, const int64_t* size,
                   const ElementCode& code, T* slab) {
  const int64_t width = box.extent[2];
  const int64_t left = std::clamp<int64_t>(-box.first[2], 0, width);
  const int64_t right = std::clamp<int64_t>(box.first[2] + width - size[2], 0, width);
  const int64_t inside = std::max<int64_t>(0, width - left - right), step = tensor.stride[axis_w];
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t z = 0; z < box.extent[0]; ++z)
      for (int64_t y = 0; y < box.extent[1]; ++y, slab += width) {
        std::fill_n(slab, left, T(0));
        std::fill_n(slab + width - right, right, T(0));
        if (!inside) continue;
        const char* p = from + c * tensor.stride[axis_c] + (box.first[0] + z) * tensor.stride[axis_d] +
                        (box.first[1] + y) * tensor.stride[axis_h] + (box.first[2] + left) * step;
        if constexpr (sizeof(T) == 8) {
          code.decode64(p, step, inside, slab + left);
        } else {
          code.decode(p, step, inside, slab + left);
          if (code.round) code.round(slab + left, inside);
        }
      }
}

template <typename T>
void load_together_as(const Tensor& tensor, int64_t image, int64_t first_channel, int64_t channels, const PixelBox& box,
                   const int64_t* size, const Isa& isa, const ElementCode& code, T* slab) {
  const int64_t width = box.extent[2], left = std::clamp<int64_t>(-box.first[2], 0, width), bytes = size_of(code.dtype);
  const int64_t inside = std::clamp<int64_t>(size[2] - box.first[2], left, width) - left;
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y, slab += width * channels) {
      const char* p = tensor.data + image * tensor.stride[axis_n] + first_channel * bytes +
                      (box.first[0] + z) * tensor.stride[axis_d] + (box.first[1] + y) * tensor.stride[axis_h] +
                      (box.first[2] + left) * tensor.stride[axis_w];
      T *to = slab + left * channels, *end = to + inside * channels;
      std::fill(slab, to, T(0));
      std::fill(end, slab + width * channels, T(0));
      if constexpr (sizeof(T) == 8) {
        for (; to < end; to += channels, p += tensor.stride[axis_w]) code.decode64(p, bytes, channels, to);
      } else {
        const bool dense = tensor.stride[axis_w] == channels * bytes;
        if (dense) code.decode(p, bytes, inside * channels, to);
        else isa.decode_block[int(code.dtype)](p, tensor.stride[axis_w], bytes, inside, channels, to, channels);
        if (code.round) code.round(to, inside * channels);
      }
    }
}

}  // namespace

void load_plain(const Tensor& tensor, int64_t image, int64_t first_channel, int64_t channels, const PixelBox& box,
                const int64_t* size, const ElementCode& code, void* slab) {
  const char* from = tensor.data + image * tensor.stride[axis_n] + first_channel * tensor.stride[axis_c];
  if (code.decode64) load_plain_as(tensor, from, channels, box, size, code, static_cast<double*>(slab));
  else load_plain_as(tensor, from, channels, box, size, code, static_cast<float*>(slab));
}

void load_together(const Tensor& tensor, int64_t image, int64_t first_channel, int64_t channels, const PixelBox& box,
                   const int64_t* size, const Isa& isa, const ElementCode& code, void* slab) {
  if (code.decode64)
    load_together_as(tensor, image, first_channel, channels, box, size, isa, code, static_cast<double*>(slab));
  else load_together_as(tensor, image, first_channel, channels, box, size, isa, code, static_cast<float*>(slab));
}

namespace {

struct FewPlan {
  Problem problem;
  LaneWay way;
  bool broadcast;  // the destination has the lanes; otherwise the source has them and the destination is their sum
  FewShape shape;
  LaneKernels kernels;
  BoxCut cut{};
  std::vector<LanePhase> phases[3], pair_phases;
  bool pairs;  // bf16: two taps along x that follow each other are one product, see pair_taps
  int64_t images, image_blocks, batch = 1, slab_image = 0;  // slab_image: elements of the slab of one image
  int64_t packed_bytes, finite_bytes, slab_bytes, scratch_bytes;
  bool stream;

  FewPlan(const Problem& p, bool broadcast)
      : problem(p), way{&problem.geo, p.wrt == wrt_input}, broadcast(broadcast),
        shape(p.geo, p.isa->vector_bytes / int(element_bytes()), way.input != broadcast), kernels(p.isa->level) {
    for (int a = 0; a < 3; ++a) phases[a] = way.phases(a);
    pairs = broadcast && bf16_pairs(p) && p.geo.kernel[2] > (way.input ? p.geo.stride[2] : 1);
    for (LanePhase phase : phases[2]) {
      phase.taps = divide_up(phase.taps, 2);
      phase.tap_step *= 2;
      phase.source_tap_step *= 2;
      pair_phases.push_back(phase);
    }
    const int64_t positions = divide_up(way.to_size()[2], int64_t(phases[2].size()));
    images = positions <= 3 ? std::min({p.geo.N, most_images, std::max<int64_t>(8, p.geo.N / 8)}) : 1;
    image_blocks = divide_up(p.geo.N, images);
  }
  FewPlan(const FewPlan&) = delete;

  int64_t element_bytes() const { return problem.dtype == Dtype::f64 ? 8 : 4; }
  int64_t parts() const { return broadcast ? shape.blocks : shape.few; }
  int64_t slab_elements(const int64_t* extent) const {
    int64_t n = broadcast ? shape.few : shape.blocks * shape.lanes;
    for (int a = 0; a < 3; ++a) n *= way.source_extent(a, extent[a]);
    return n;
  }
  int64_t rows_at_once(const int64_t* extent) const {
    if (images > 1) return images;
    const int64_t whole = shape.lanes / std::gcd(int64_t(shape.lanes), extent[2]);
    return std::min<int64_t>({extent[1], most_batch, std::max<int64_t>(whole, divide_up(128, extent[2]))});
  }
  int64_t held_vectors(const int64_t* extent) const {
    return divide_up(images * slab_elements(extent), shape.lanes) + parts() * rows_at_once(extent) * extent[2];
  }

  void choose_boxes();
  double cycles() const;
  int64_t weight_bytes() const {
    return problem.geo.G * shape.blocks * shape.few * problem.geo.taps() * problem.isa->vector_bytes;
  }
  template <typename T>
  void pack(const Tensor& w, int64_t group, T* packed, bool& finite) const;
  void pair_weights(const float* packed, uint32_t* words) const;
  bool pair_slab(char* slab, int64_t rows, int64_t width) const;
  void box(const Arguments& args, int64_t group, int64_t image_block, const PixelBox& to_box, const char* packed,
           const bool* finite, char* scratch) const;
  void run(const Arguments& args) const;
};

// The weights of one group as [part][source channel][taps][lane].
template <typename T>
void FewPlan::pack(const Tensor& w, int64_t group, T* packed, bool& finite) const {
  const Geometry& geo = problem.geo;
  const ElementCode code = operand_code(problem);
  const int64_t taps = geo.taps(), L = shape.lanes;
  std::vector<T> line(taps);
  finite = true;
  for (int64_t m = 0; m < shape.blocks * L; ++m)
    for (int64_t f = 0; f < shape.few; ++f) {
      const int64_t block = m / L, first = broadcast ? block * shape.few + f : f * shape.blocks + block;
      T* to = packed + first * taps * L + m % L;
      if (m < shape.many) read_taps(geo, w, w.data + shape.weight_offset(geo, w, group, m, f), code, line.data());
      else std::fill(line.begin(), line.end(), T(0));
      for (int64_t tap = 0; tap < taps; ++tap, to += L) {
        *to = line[tap];
        finite &= std::isfinite(line[tap]);
      }
    }
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Two bf16, which are the upper halves of floats.
uint32_t pair_of(uint32_t first, uint32_t second) { return first >> 16 | (second & 0xffff0000u); }

// The weights of a group with those of the next tap of the same phase; zero where there is none.
void FewPlan::pair_weights(const float* packed, uint32_t* words) const {
  const int64_t S = problem.geo.kernel[2], step = phases[2][0].tap_step, L = shape.lanes;
  const int64_t rows = shape.blocks * shape.few * problem.geo.taps() / S;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t s = 0; s < S; ++s)
      for (int64_t lane = 0; lane < L; ++lane, ++packed)
        *words++ = pair_of(bits_of(*packed), s + step < S ? bits_of(packed[step * L]) : 0);
}

// Makes words of a pixel and the one that the next tap reads, in place; false where an Inf or NaN would meet a weight
// that stands for no tap.
bool FewPlan::pair_slab(char* slab, int64_t rows, int64_t width) const {
  uint32_t* row = reinterpret_cast<uint32_t*>(slab);
  constexpr uint32_t exponent = 0x7f800000;
  uint32_t bad = 0;
  for (int64_t i = 0; i < rows * width; ++i) bad |= (row[i] & exponent) == exponent;
  if (bad) return false;
  const int64_t step = phases[2][0].source_tap_step, some = std::max<int64_t>(0, width - std::llabs(step));
  for (int64_t y = 0; y < rows; ++y, row += width) {
    if (step > 0) {
      for (int64_t i = 0; i < some; ++i) row[i] = pair_of(row[i], row[i + step]);
      for (int64_t i = some; i < width; ++i) row[i] >>= 16;
    } else {
      for (int64_t i = width - 1; i >= width - some; --i) row[i] = pair_of(row[i], row[i + step]);
      for (int64_t i = 0; i < width - some; ++i) row[i] >>= 16;
    }
  }
  return true;
}

void FewPlan::box(const Arguments& args, int64_t group, int64_t image_block, const PixelBox& to_box, const char* packed,
                  const bool* finite, char* scratch) const {
  const Geometry& geo = problem.geo;
  const ElementCode operand = operand_code(problem), result = result_code(problem);
  const Tensor &from = way.input ? args.y : args.x, &to = way.input ? args.x : args.y;
  const int64_t image = image_block * images, here = std::min(images, geo.N - image);
  LaneCorrelation job{};
  job.broadcast = broadcast;
  job.reduce = !broadcast;
  job.passes = 1;
  job.parts = parts();
  job.to_box = to_box;
  job.source_box = way.source(to_box);
  job.source_channels = broadcast ? shape.few : shape.blocks;
  job.slab = scratch;
  job.rows = scratch + slab_bytes;
  job.weights = packed;
  job.finite = finite;
  job.weight_from = geo.taps();
  job.weight_to = job.source_channels * geo.taps();
  job.weight_tap[0] = geo.kernel[1] * geo.kernel[2];
  job.weight_tap[1] = geo.kernel[2];
  job.weight_tap[2] = 1;
  for (int a = 0; a < 3; ++a) {
    job.source_size[a] = way.from_size()[a];
    job.phase[a] = phases[a].data();
    job.phases[a] = int64_t(phases[a].size());
  }
  job.images = images > 1 ? here : 1;
  job.batch = images > 1 ? here : batch;
  const int64_t* e = job.source_box.extent;
  job.slab_image = job.source_channels * e[0] * e[1] * e[2] * (broadcast ? 1 : shape.lanes);
  const auto correlate = [&] {
#if defined(__x86_64__)
    if (pairs && *finite && pair_slab(scratch, here * job.source_channels * e[0] * e[1], e[2])) {
      job.weights = packed + weight_bytes();
      job.phase[2] = pair_phases.data();
      return avx512_bf16::correlate_pairs(job);
    }
#endif
    kernels.correlate(job);
  };
  for (int64_t i = 0; i < here; ++i) {
    char* slab = scratch + i * job.slab_image * element_bytes();
    if (broadcast) {
      load_plain(from, image + i, group * shape.few, shape.few, job.source_box, job.source_size, operand, slab);
      continue;
    }
    kernels.load(channel_planes(from, image + i, group * shape.many, shape.many, shape.lanes, 0, shape.blocks, operand),
                 job.source_box, job.source_size, slab);
    if (operand.round) operand.round(reinterpret_cast<float*>(slab), job.slab_image);
  }
  if (broadcast) {
    job.to = channel_planes(to, image, group * shape.many, shape.many, shape.lanes, 0, shape.blocks, result);
  } else {
    job.to = channel_planes(to, image, group * shape.few, 1, 1, 0, 1, result);
  }
  job.to.stream = stream && broadcast;
  // A sole image of the last block: the kernel sees images == 1 and takes rows, one at a time.
  if (images > 1 && here == 1) job.batch = 1;
  correlate();
}

void FewPlan::run(const Arguments& args) const {
  const int64_t groups = problem.geo.G, group_bytes = weight_bytes() / groups, boxes = cut.boxes();
  bool* finite = reinterpret_cast<bool*>(args.workspace + packed_bytes);
  char* scratch = args.workspace + packed_bytes + finite_bytes;
  parallel_for(groups, args.threads, [&](int64_t group, int) {
    char* packed = args.workspace + group * group_bytes;
    if (problem.dtype == Dtype::f64) pack(args.w, group, reinterpret_cast<double*>(packed), finite[group]);
    else pack(args.w, group, reinterpret_cast<float*>(packed), finite[group]);
    if (pairs && finite[group])
      pair_weights(reinterpret_cast<float*>(packed), reinterpret_cast<uint32_t*>(packed + weight_bytes()));
  });
  parallel_for(groups * image_blocks * boxes, args.threads, [&](int64_t task, int slot) {
    const int64_t group = task % groups, image_block = task / groups / boxes;
    box(args, group, image_block, cut.box(task / groups % boxes, way.to_size()), args.workspace + group * group_bytes,
        finite + group, scratch + slot * scratch_bytes);
  });
}

void FewPlan::choose_boxes() {
  const Geometry& geo = problem.geo;
  const int64_t vector_bytes = problem.isa->vector_bytes;
  packed_bytes = weight_bytes() * (pairs ? 2 : 1);
  finite_bytes = up_to_multiple(geo.G, 64);
  for (int64_t limit = l2_bytes / 3 / vector_bytes;; limit /= 2) {
    cut = choose_box(way.to_size(), geo.G * image_blocks, limit, [&](const int64_t* e) { return held_vectors(e); });
    batch = rows_at_once(cut.extent);
    slab_bytes = up_to_multiple(images * slab_elements(cut.extent) * element_bytes(), 64);
    scratch_bytes = up_to_multiple(slab_bytes + parts() * batch * cut.extent[2] * vector_bytes, 64);
    if (packed_bytes + finite_bytes + scratch_bytes <= problem.max_workspace || (limit <= 1 && images == 1)) return;
    if (limit <= 1) {
      images = divide_up(images, 2);
      image_blocks = divide_up(geo.N, images);
    }
    limit = std::max<int64_t>(limit, 2);
  }
}

double FewPlan::cycles() const {
  const Geometry& geo = problem.geo;
  double pixels = double(geo.N) * geo.G, reach = 1;
  for (int a = 0; a < 3; ++a) {
    pixels *= way.to_size()[a];
    reach *= double(geo.kernel[a]) / (way.input ? geo.stride[a] : 1);
  }
  // Per tile of (parts x pixels): one load per part and pixel, one multiplication per pair; rows shorter than a tile.
  const double positions = double(divide_up(cut.extent[2], int64_t(phases[2].size())));
  const double tile_parts = std::min<double>(4, double(parts()));
  const double width = images > 1 ? double(std::min<int64_t>(images, 8)) : std::min(8.0, positions);
  const double fma = problem.isa->two_wide_fmas ? 0.66 : 1.1;  // not half: loads of operands take part of the gain
  const double per_product = std::max(fma, (tile_parts + width) / (tile_parts * width)) + 0.7 / width;
  const double vectors = double(shape.blocks * shape.few * geo.taps());
  // Phases of a strided input gradient are short sums: measured 1.3 times slower per product.
  const double short_sums = way.input && geo.stride[2] > 1 && images == 1 && shape.few > 1 ? 1.3 : 1;
  double paired = 0;  // products that are left
  for (const LanePhase& phase : pair_phases) paired += double(phase.taps) / double(geo.kernel[2]);
  const double products = pixels * shape.blocks * shape.few * reach * per_product * short_sums *
                          landing_share(geo) * (pairs ? paired : 1);
  // Weights that do not stay in the second-level cache come again for every row of tiles.
  double rows = double(geo.N) * geo.G / images * way.to_size()[0] * way.to_size()[1];
  if (way.input) rows /= double(geo.stride[0] * geo.stride[1]);
  const bool far = vectors * problem.isa->vector_bytes > l2_bytes / 2;
  const double weights = far ? rows * vectors * 10 : 0;
  const double lane_vectors = (broadcast ? pixels : double(image_blocks * images) * geo.G * cut.boxes() *
                                                        slab_elements(cut.extent) / (shape.blocks * shape.lanes)) *
                              shape.blocks;
  const int64_t* nominal = broadcast == way.input ? problem.x_nominal : problem.y_nominal;
  const int64_t bytes = size_of(problem.dtype);
  const LaneSpread one_image(Geometry{1, 64, 64, 64, {}, {}, {}, {}, {}, {}}, shape.lanes);
  const double moves = lane_vectors * lane_move_cycles(nominal, bytes, 1, one_image);
  const double reduces = broadcast ? 0 : pixels * shape.few * 10;
  const double plain = broadcast ? double(geo.N) * (way.input ? geo.K * geo.out_pixels() : geo.C * geo.in_pixels()) : 0;
  const double plain_cycles = (way.input ? problem.y_nominal : problem.x_nominal)[axis_w] == bytes ? 1.5 : 3;
  const double moved = double(geo.N) * (geo.C * geo.in_pixels() + geo.K * geo.out_pixels()) * bytes;
  const double cycles = lane_weight_cycles(geo) + products + weights + moves + reduces + plain_cycles * plain;
  return std::max(cycles, moved * cycles_per_byte);
}

std::optional<Plan> plan_one(const Problem& problem, bool broadcast, std::string& why_not) {
  auto p = std::make_shared<FewPlan>(problem, broadcast);
  const Geometry& geo = p->problem.geo;
  p->stream = geo.N * (geo.C * geo.in_pixels() + geo.K * geo.out_pixels()) * size_of(problem.dtype) > cache_bytes;
  p->choose_boxes();
  Plan plan;
  if (!fit_workspace(plan, problem, p->packed_bytes + p->finite_bytes, p->scratch_bytes, p->cycles(), why_not))
    return std::nullopt;
  plan.kernel = std::string("few_") + (broadcast ? "broadcast_" : "reduce_") +
                (problem.dtype == Dtype::f64 ? "f64_" : p->pairs ? "bf16_" : "f32_") + std::to_string(p->shape.lanes) +
                "lanes_" + (p->pairs ? "avx512_bf16" : compiled_level(problem.isa->level));
  char note[256];
  std::snprintf(note, sizeof note, "%lld parts of %lld lanes, %lld boxes of %lldx%lldx%lld pixels, %lld images at once",
                (long long)p->parts(), (long long)p->shape.lanes, (long long)p->cut.boxes(),
                (long long)p->cut.extent[0], (long long)p->cut.extent[1], (long long)p->cut.extent[2],
                (long long)p->images);
  plan.notes.push_back(note);
  plan.run = [p](const Arguments& args) { p->run(args); };
  return plan;
}

}  // namespace

std::optional<Plan> plan_few(const Problem& problem, std::string& why_not) {
  const Geometry& g = problem.geo;
  if (!g.N || !g.C || !g.K || !g.out_pixels() || !g.in_pixels()) {
    why_not = "a tensor without elements";
    return std::nullopt;
  }
  if (LaneWay{&g, problem.wrt == wrt_input}.too_many_phases()) {
    why_not = "more phases than " + std::to_string(LaneWay::most_phases);
    return std::nullopt;
  }
  // Groups with channels last are what the dense kernels are slowest for.
  const int64_t narrow = std::min(g.group_in(), g.group_out());
  const int64_t most = g.G > 1 && problem.x_nominal[axis_c] == size_of(problem.dtype) ? 96 : 64;
  if (narrow > most) {
    why_not = std::to_string(narrow) + " channels on the narrow side: few is up to " + std::to_string(most);
    return std::nullopt;
  }
  if (problem.wrt == wrt_weight || problem.wrt == (wrt_weight | wrt_bias)) return plan_few_weight(problem, why_not);
  if (problem.wrt != wrt_output && problem.wrt != wrt_input) {
    why_not = "this combination of results is served one by one";
    return std::nullopt;
  }
  const auto broadcast = plan_one(problem, true, why_not), reduce = plan_one(problem, false, why_not);
  if (!broadcast) return reduce;
  return reduce && reduce->seconds < broadcast->seconds ? reduce : broadcast;
}

}  // namespace convgrad
