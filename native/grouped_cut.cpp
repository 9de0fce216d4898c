// Lanes, boxes and phases of the grouped family; see grouped.h.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "grouped.h"
#include "threads.h"

namespace convgrad {

LaneSpread::LaneSpread(const Geometry& geo, int lanes) : lanes(lanes) {
  images = geo.G < lanes ? std::max<int64_t>(1, lanes / geo.G) : 1;
  weight_blocks = images > 1 ? 1 : divide_up(geo.G, lanes);
  image_blocks = divide_up(geo.N, images);
}

int64_t LaneSpread::group_of(const Geometry& geo, int64_t weight_block, int lane) const {
  if (images > 1) return lane < images * geo.G ? lane % geo.G : -1;
  const int64_t group = weight_block * lanes + lane;
  return group < geo.G ? group : -1;
}

LanePlanes LaneSpread::planes(const Geometry& geo, const Tensor& tensor, int64_t channels, const ElementCode& code,
                              int64_t image_block, int64_t weight_block, int64_t blocks) const {
  LanePlanes p{};
  p.data = tensor.data;
  p.stride = tensor.stride;
  p.code = code;
  p.channels = channels;
  p.blocks = blocks;
  const int64_t image = image_block * images, first_group = images > 1 ? 0 : weight_block * lanes;
  const int64_t group_step = channels * tensor.stride[axis_c];
  p.planes = images > 1 ? std::min(images, geo.N - image) * geo.G : std::min(lanes * blocks, geo.G - first_group);
  for (int l = 0; l < lanes; ++l) {
    const int64_t n = image + (images > 1 ? l / geo.G : 0), group = images > 1 ? l % geo.G : first_group + l;
    p.offset[l] = n * tensor.stride[axis_n] + group * group_step;
  }
  p.lane_step = images > 1 ? 0 : group_step;
  p.block_step = lanes * group_step;
  return p;
}

PixelBox BoxCut::box(int64_t index, const int64_t* size) const {
  const int64_t at[3] = {index / (count[1] * count[2]), index / count[2] % count[1], index % count[2]};
  PixelBox box;
  for (int a = 0; a < 3; ++a) {
    box.first[a] = at[a] * extent[a];
    box.extent[a] = std::min(extent[a], size[a] - box.first[a]);
  }
  return box;
}

static int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

std::vector<LanePhase> LaneWay::phases(int axis) const {
  const int64_t stride = geo->stride[axis], dilation = geo->dilation[axis], pad = geo->pad[axis];
  if (!input) return {{0, 1, geo->kernel[axis], 0, 1, -pad, stride, dilation}};
  const int64_t common = std::gcd(stride, dilation), tap_step = stride / common;
  std::vector<LanePhase> list;
  for (int64_t r = 0; r < phase_count(axis); ++r) list.push_back({r, stride, 0, 0, tap_step, 0, 1, -dilation / common});
  // A residue r has the taps with r + pad - tap*dilation divisible by the stride; they are tap_step apart.
  for (int64_t tap = 0; tap < std::min(tap_step, geo->kernel[axis]); ++tap) {
    const int64_t at = tap * dilation - pad, r = at - floor_divide(at, stride) * stride;
    if (r >= int64_t(list.size())) continue;
    LanePhase& phase = list[size_t(r)];
    phase.tap_first = tap;
    phase.taps = divide_up(geo->kernel[axis] - tap, tap_step);
    phase.source = (r - at) / stride;
  }
  return list;
}

int64_t LaneWay::source_extent(int axis, int64_t extent) const {
  const int64_t span = (geo->kernel[axis] - 1) * geo->dilation[axis], stride = geo->stride[axis];
  const int64_t free = input ? (extent - 1 + span) / stride + 1 : (extent - 1) * stride + span + 1;
  return axis == 2 ? free : std::min(free, from_size()[axis]);
}

PixelBox LaneWay::source(const PixelBox& to) const {
  PixelBox from;
  for (int a = 0; a < 3; ++a) {
    const int64_t span = (geo->kernel[a] - 1) * geo->dilation[a], pad = geo->pad[a], stride = geo->stride[a];
    const int64_t last = to.first[a] + to.extent[a] - 1;
    int64_t low = input ? -floor_divide(-(to.first[a] + pad - span), stride) : to.first[a] * stride - pad;
    int64_t high = (input ? floor_divide(last + pad, stride) : last * stride + span - pad) + 1;
    if (a < 2) {
      low = std::max<int64_t>(low, 0);
      high = std::min(high, from_size()[a]);
    }
    from.first[a] = low;
    from.extent[a] = std::max<int64_t>(0, high - low);
  }
  return from;
}

PixelBox input_box(const Geometry& geo, const PixelBox& dy) { return LaneWay{&geo, false}.source(dy); }

ElementCode operand_code(const Problem& problem) {
  const Isa& isa = *problem.isa;
  const int type = int(problem.dtype);
  const bool f64 = problem.dtype == Dtype::f64;
  return {problem.dtype, isa.decode[type], f64 ? isa.decode64 : nullptr,
          f64 ? nullptr : isa.rounding(problem.dtype, problem.compute), nullptr, nullptr};
}

ElementCode result_code(const Problem& problem) {
  const Isa& isa = *problem.isa;
  const int type = int(problem.out_dtype);
  const bool f64 = problem.dtype == Dtype::f64;
  return {problem.out_dtype, nullptr, f64 ? isa.decode64 : nullptr, nullptr, isa.encode[type],
          f64 ? isa.encode64[type] : nullptr};
}

bool fit_workspace(Plan& plan, const Problem& problem, int64_t shared, int64_t per_thread, double cycles,
                   std::string& why_not) {
  constexpr double clock_hz = 3.0e9, small_cycles = 60e3;  // below this a second thread costs more than it brings
  if (shared + per_thread > problem.max_workspace) {
    why_not = "needs at least " + std::to_string(shared + per_thread) + " bytes of workspace, max_workspace_bytes=" +
              std::to_string(problem.max_workspace);
    return false;
  }
  const int64_t room = (problem.max_workspace - shared) / std::max<int64_t>(1, per_thread);
  plan.threads = cycles < small_cycles ? 1 : int(std::min<int64_t>(std::max(1, problem.threads), room));
  plan.workspace_bytes = shared + plan.threads * per_thread;
  plan.seconds = cycles / clock_hz;  // of one thread: the choice must not depend on their number
  return true;
}

#if defined(__x86_64__)
#define CONVGRAD_LANE_KERNEL(name) isa_pick(level, generic::name, avx2::name, avx512::name)
#else
#define CONVGRAD_LANE_KERNEL(name) generic::name
#endif

LaneKernels::LaneKernels([[maybe_unused]] int level)
    : load(CONVGRAD_LANE_KERNEL(load_lanes)),
      correlate(CONVGRAD_LANE_KERNEL(correlate_lanes)),
      weight_grad(CONVGRAD_LANE_KERNEL(weight_grad_lanes)),
      finite(CONVGRAD_LANE_KERNEL(finite_lanes)),
      sum(CONVGRAD_LANE_KERNEL(sum_lanes)),
      lines(CONVGRAD_LANE_KERNEL(correlate_lines)),
      line_weight(CONVGRAD_LANE_KERNEL(weight_grad_lines)),
      direct(CONVGRAD_LANE_KERNEL(correlate_direct)),
      direct_weight(CONVGRAD_LANE_KERNEL(weight_grad_direct)) {}

namespace {

// Calls line(offset, first, n, stride) for every stretch of taps that are evenly spaced in memory: mostly one.
template <typename Line>
void each_tap_line(const Geometry& geo, const Tensor& w, const Line& line) {
  const int64_t R = geo.kernel[1], S = geo.kernel[2], rows = geo.kernel[0] * R;
  const int64_t step = S > 1 ? w.stride[axis_w] : R > 1 ? w.stride[axis_h] : w.stride[axis_d];
  const bool even = (R == 1 || S == 1 || w.stride[axis_h] == S * step) &&
                    (geo.kernel[0] == 1 || R * S == 1 || w.stride[axis_d] == R * S * step);
  if (even) return line(0, 0, rows * S, step);
  for (int64_t row = 0; row < rows; ++row)
    line(row / R * w.stride[axis_d] + row % R * w.stride[axis_h], row * S, S, w.stride[axis_w]);
}

}  // namespace

template <typename T>
void read_taps(const Geometry& geo, const Tensor& w, const char* at, const ElementCode& code, T* line) {
  each_tap_line(geo, w, [&](int64_t offset, int64_t first, int64_t n, int64_t stride) {
    if constexpr (sizeof(T) == 8) {
      code.decode64(at + offset, stride, n, line + first);
    } else {
      code.decode(at + offset, stride, n, line + first);
      if (code.round) code.round(line + first, n);
    }
  });
}

template <typename T>
void write_taps(const Geometry& geo, const Tensor& w, char* at, const ElementCode& code, const T* line) {
  each_tap_line(geo, w, [&](int64_t offset, int64_t first, int64_t n, int64_t stride) {
    if constexpr (sizeof(T) == 8) code.encode64(line + first, n, at + offset, stride);
    else code.encode(line + first, n, at + offset, stride);
  });
}

template void read_taps(const Geometry&, const Tensor&, const char*, const ElementCode&, float*);
template void read_taps(const Geometry&, const Tensor&, const char*, const ElementCode&, double*);
template void write_taps(const Geometry&, const Tensor&, char*, const ElementCode&, const float*);
template void write_taps(const Geometry&, const Tensor&, char*, const ElementCode&, const double*);

double landing_share(const Geometry& geo) {
  double share = 1;
  for (int a = 0; a < 2; ++a) {
    int64_t landing = 0;
    for (int64_t k = 0; k < geo.kernel[a]; ++k) {
      const int64_t shift = k * geo.dilation[a] - geo.pad[a];  // input = output*stride + shift
      const int64_t low = shift < 0 ? divide_up(-shift, geo.stride[a]) : 0;
      const int64_t high = std::min(geo.out[a], floor_divide(geo.in[a] - 1 - shift, geo.stride[a]) + 1);
      landing += std::max<int64_t>(0, high - low);
    }
    share *= double(landing) / double(geo.out[a] * geo.kernel[a]);
  }
  return share;
}

double lane_weight_cycles(const Geometry& geo) {
  const double pairs = double(geo.K) * geo.group_in();
  return pairs * (25 + 4.0 * geo.taps());
}

namespace {

template <typename T>
void pack_block(const Geometry& geo, const LaneSpread& spread, const Tensor& w, const ElementCode& code, int64_t block,
                T* packed, bool& finite) {
  const int64_t taps = geo.taps(), L = spread.lanes;
  std::vector<T> line(taps);
  finite = true;
  for (int lane = 0; lane < L; ++lane) {
    const int64_t group = spread.group_of(geo, block, lane);
    T* to = packed + lane;
    for (int64_t k = 0; k < geo.group_out(); ++k)
      for (int64_t c = 0; c < geo.group_in(); ++c) {
        if (group < 0) {
          std::fill(line.begin(), line.end(), T(0));
        } else {
          const char* at = w.data + (group * geo.group_out() + k) * w.stride[axis_o] + c * w.stride[axis_i];
          read_taps(geo, w, at, code, line.data());
        }
        for (int64_t tap = 0; tap < taps; ++tap, to += L) {
          *to = line[tap];
          finite &= std::isfinite(line[tap]);
        }
      }
  }
}

}  // namespace

void pack_lane_weights(const Geometry& geo, const LaneSpread& spread, const Tensor& w, const ElementCode& code,
                       void* packed, bool* finite, int threads) {
  const int64_t block_size = geo.group_out() * geo.group_in() * geo.taps() * spread.lanes;
  parallel_for(spread.weight_blocks, threads, [&](int64_t block, int) {
    if (code.decode64)
      pack_block(geo, spread, w, code, block, static_cast<double*>(packed) + block * block_size, finite[block]);
    else
      pack_block(geo, spread, w, code, block, static_cast<float*>(packed) + block * block_size, finite[block]);
  });
}

}  // namespace convgrad
