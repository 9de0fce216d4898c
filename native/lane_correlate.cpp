// Output and input gradient in lane form: register tiles of destination channels by pixels, swept over all taps.
#include "lane_io.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

// Accumulators of a tile: what the register file holds beside one row of weights.
#if CONVGRAD_VECTOR_BYTES == 64
constexpr int widest_tile[5] = {0, 8, 8, 0, 6};  // pixels of a tile of 1, 2 and 4 destination channels
#else
constexpr int widest_tile[5] = {0, 8, 5, 0, 0};
#endif

// What the tiles of one destination row share; steps in elements.
struct Sweep {
  int64_t channels, t, r, s;
  int64_t from_channel, from_t, from_r, from_s, from_pixel;
  int64_t w_to, w_channel, w_t, w_r, w_s;
  int64_t to_channel, to_pixel;
};

// to[k][p] = sum over channels and taps of w[k][...] * from[p + ...], for K channels and P pixels in registers.
template <typename T, int K, int P>
void sweep_tile(const Sweep& sweep, const T* from, const T* w, T* to) {
  using V = Vec<T>;
  V sum[K][P];
  for (int k = 0; k < K; ++k)
    for (int p = 0; p < P; ++p) sum[k][p] = V{};
  const int64_t step = sweep.from_pixel, tap = sweep.from_s, w_tap = sweep.w_s, w_to = sweep.w_to;
  for (int64_t c = 0; c < sweep.channels; ++c)
    for (int64_t t = 0; t < sweep.t; ++t)
      for (int64_t r = 0; r < sweep.r; ++r) {
        const T* f = from + c * sweep.from_channel + t * sweep.from_t + r * sweep.from_r;
        const T* v = w + c * sweep.w_channel + t * sweep.w_t + r * sweep.w_r;
        for (int64_t s = sweep.s; s > 0; --s, f += tap, v += w_tap) {
          V weight[K];
          for (int k = 0; k < K; ++k) weight[k] = load<V>(v + k * w_to);
          for (int p = 0; p < P; ++p) {
            const V pixel = load<V>(f + p * step);
            for (int k = 0; k < K; ++k) sum[k][p] += weight[k] * pixel;
          }
        }
      }
  for (int k = 0; k < K; ++k)
    for (int p = 0; p < P; ++p) store(to + k * sweep.to_channel + p * sweep.to_pixel, sum[k][p]);
}

template <typename T> using SweepTile = void (*)(const Sweep&, const T*, const T*, T*);

template <typename T, int K, int... P>
constexpr auto tile_table(std::integer_sequence<int, P...>) {
  struct { SweepTile<T> of[sizeof...(P)]; } table = {{sweep_tile<T, K, P + 1>...}};
  return table;
}
template <typename T, int K>
constexpr auto tiles = tile_table<T, K>(std::make_integer_sequence<int, widest_tile[K]>());

// `pixels` destination pixels of K channels in tiles of nearly equal width.
template <typename T, int K>
void sweep_pixels(const Sweep& sweep, const T* from, const T* w, T* to, int64_t pixels) {
  const int64_t count = (pixels + widest_tile[K] - 1) / widest_tile[K];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = pixels * i / count, width = pixels * (i + 1) / count - first;
    tiles<T, K>.of[width - 1](sweep, from + first * sweep.from_pixel, w, to + first * sweep.to_pixel);
  }
}

template <typename T>
void sweep_channels(const Sweep& sweep, const T* from, const T* w, T* to, int64_t channels, int64_t pixels) {
  int64_t k = 0;
  if constexpr (widest_tile[4] > 0)
    for (; k + 4 <= channels; k += 4)
      sweep_pixels<T, 4>(sweep, from, w + k * sweep.w_to, to + k * sweep.to_channel, pixels);
  for (; k + 2 <= channels; k += 2)
    sweep_pixels<T, 2>(sweep, from, w + k * sweep.w_to, to + k * sweep.to_channel, pixels);
  if (k < channels) sweep_pixels<T, 1>(sweep, from, w + k * sweep.w_to, to + k * sweep.to_channel, pixels);
}

// The taps [low, high) of position j whose source lies in [0, size).
struct TapRange { int64_t low, high; };

TapRange landing(const AxisPhase& phase, int64_t j, int64_t size) {
  const int64_t at = phase.source + j * phase.source_step, step = phase.source_tap_step;
  int64_t low = 0, high = phase.taps;
  while (low < high && (at + low * step < 0 || at + low * step >= size)) ++low;
  while (low < high && (at + (high - 1) * step < 0 || at + (high - 1) * step >= size)) --high;
  return {low, high};
}

// One destination row: every x phase into the scratch row, which then leaves lane form.
template <typename T>
struct RowJob {
  const LaneCorrelation& job;
  int64_t slab_row, slab_plane, slab_channel;  // elements
  Sweep sweep;
  static constexpr int L = lanes_of<T>;

  explicit RowJob(const LaneCorrelation& j) : job(j), sweep{} {
    slab_row = j.source_box.extent[2] * L;
    slab_plane = j.source_box.extent[1] * slab_row;
    slab_channel = j.source_box.extent[0] * slab_plane;
    sweep.channels = j.source_channels;
    sweep.from_channel = slab_channel;
    sweep.w_to = j.weight_to * L;
    sweep.w_channel = j.weight_from * L;
    sweep.to_channel = j.to_box.extent[2] * L;
  }

  void zero(int64_t first, int64_t step, int64_t pixels) const {
    T* row = static_cast<T*>(job.row);
    for (int64_t k = 0; k < job.to.channels; ++k)
      for (int64_t p = 0; p < pixels; ++p) store(row + k * sweep.to_channel + (first + p * step) * L, Vec<T>{});
  }

  // The taps of one axis other than x for destination position `at`: source offset, tap count and steps.
  bool take_axis(int axis, int64_t at, int64_t& count, int64_t& from_step, int64_t& w_step, const T*& from, const T*& w,
                 int64_t line) const {
    const AxisPhase& phase = job.phase[axis][at % job.phases[axis]];
    const int64_t j = (at - phase.first) / phase.step;
    const TapRange taps = landing(phase, j, job.source_size[axis]);
    count = taps.high - taps.low;
    from_step = phase.source_tap_step * line;
    w_step = phase.tap_step * job.weight_tap[axis] * L;
    from += (phase.source + j * phase.source_step + taps.low * phase.source_tap_step - job.source_box.first[axis]) * line;
    w += (phase.tap_first + taps.low * phase.tap_step) * job.weight_tap[axis] * L;
    return count > 0;
  }

  void x_phase(const AxisPhase& phase, const T* from, const T* w) {
    const int64_t begin = job.to_box.first[2], end = begin + job.to_box.extent[2];
    int64_t j = (begin - phase.first + phase.step - 1) / phase.step;
    if (begin <= phase.first) j = 0;
    const int64_t at = phase.first + j * phase.step;
    if (at >= end) return;
    const int64_t pixels = (end - 1 - at) / phase.step + 1;
    if (phase.taps == 0) return zero(at - begin, phase.step, pixels);
    sweep.s = phase.taps;
    sweep.from_pixel = phase.source_step * L;
    sweep.from_s = phase.source_tap_step * L;
    sweep.w_s = phase.tap_step * job.weight_tap[2] * L;
    sweep.to_pixel = phase.step * L;
    from += (phase.source + j * phase.source_step - job.source_box.first[2]) * L;
    w += phase.tap_first * job.weight_tap[2] * L;
    T* to = static_cast<T*>(job.row) + (at - begin) * L;
    if (!job.careful) return sweep_channels(sweep, from, w, to, job.to.channels, pixels);
    for (int64_t p = 0; p < pixels; ++p, from += sweep.from_pixel, to += sweep.to_pixel) {
      const TapRange taps = landing(phase, j + p, job.source_size[2]);
      sweep.s = taps.high - taps.low;
      sweep_channels(sweep, from + taps.low * sweep.from_s, w + taps.low * sweep.w_s, to, job.to.channels, 1);
    }
  }

  template <typename E>
  void row(int64_t z, int64_t y) {
    const T *from = static_cast<const T*>(job.slab), *w = static_cast<const T*>(job.weights);
    const bool reached = take_axis(0, z, sweep.t, sweep.from_t, sweep.w_t, from, w, slab_plane) &&
                         take_axis(1, y, sweep.r, sweep.from_r, sweep.w_r, from, w, slab_row);
    if (reached) {
      for (int64_t i = 0; i < job.phases[2]; ++i) x_phase(job.phase[2][i], from, w);
    } else {
      zero(0, 1, job.to_box.extent[2]);
    }
    const LanePlanes& to = job.to;
    char* p = to.data + z * to.stride[axis_d] + y * to.stride[axis_h] + job.to_box.first[2] * to.stride[axis_w];
    store_row<E>(to, p, job.to_box.extent[2], static_cast<const T*>(job.row), sweep.to_channel);
  }
};

template <typename E>
void correlate(const LaneCorrelation& job) {
  RowJob<typename E::T> rows(job);
  const PixelBox& box = job.to_box;
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y) rows.template row<E>(box.first[0] + z, box.first[1] + y);
}

template <typename E>
void load_box(const LanePlanes& from, const PixelBox& box, const int64_t* size, typename E::T* slab) {
  using T = typename E::T;
  constexpr int L = lanes_of<T>;
  const int64_t row = box.extent[2] * L, rows = box.extent[0] * box.extent[1];
  const int64_t left = box.first[2] < 0 ? -box.first[2] : 0;
  int64_t right = box.first[2] + box.extent[2] - size[2];
  if (right < 0) right = 0;
  const int64_t inside = box.extent[2] - left - right;
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; ++y, slab += row) {
      for (int64_t c = 0; c < from.channels; ++c) {
        T* line = slab + c * rows * row;
        for (int64_t x = 0; x < left && x < box.extent[2]; ++x) store(line + x * L, Vec<T>{});
        for (int64_t x = 0; x < right && x < box.extent[2]; ++x) store(line + (box.extent[2] - 1 - x) * L, Vec<T>{});
      }
      if (inside <= 0) continue;
      const char* p = from.data + (box.first[0] + z) * from.stride[axis_d] + (box.first[1] + y) * from.stride[axis_h] +
                      (box.first[2] + left) * from.stride[axis_w];
      load_row<E>(from, p, inside, slab + left * L, rows * row);
    }
}

}  // namespace

void load_lanes(const LanePlanes& from, const PixelBox& box, const int64_t* size, void* slab) {
  switch (from.code.dtype) {
    case Dtype::f64: return load_box<AsF64>(from, box, size, static_cast<double*>(slab));
    case Dtype::f32: return load_box<AsF32>(from, box, size, static_cast<float*>(slab));
    case Dtype::bf16: return load_box<AsBf16>(from, box, size, static_cast<float*>(slab));
#if defined(__F16C__)
    case Dtype::f16: return load_box<AsF16>(from, box, size, static_cast<float*>(slab));
#endif
    default: return load_box<AsLines>(from, box, size, static_cast<float*>(slab));
  }
}

void correlate_lanes(const LaneCorrelation& job) {
  const Dtype to = job.to.code.dtype;
  if (job.to.code.decode64) {  // f64 operands: sums are double
    if (to == Dtype::f64) return correlate<AsF64>(job);
    return correlate<AsLines64>(job);
  }
  switch (to) {
    case Dtype::f32: return correlate<AsF32>(job);
    case Dtype::bf16: return correlate<AsBf16>(job);
#if defined(__F16C__)
    case Dtype::f16: return correlate<AsF16>(job);
#endif
    default: return correlate<AsLines>(job);
  }
}

}  // namespace convgrad::CONVGRAD_ISA
