// Output and input gradient in lane form: register tiles of destination channels by pixels, swept over all taps.
#include "blocked_sums.h"
#include "lane_io.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

// Accumulators of a tile: what the register file holds beside one row of weights.
#if CONVGRAD_VECTOR_BYTES == 64
constexpr int most_parts = 4, widest_tile[] = {0, 14, 12, 8, 6};  // pixels of a tile of 1 to 4 destination vectors
constexpr int widest_slide = 14;                                   // pixels of a sliding tile
#else
constexpr int most_parts = 3, widest_tile[] = {0, 8, 5, 3};
constexpr int widest_slide = 8;
#endif

// What the tiles of one destination row share; steps in elements.
struct Sweep {
  int64_t channels, t, r, s;
  int64_t from_channel, from_t, from_r, from_s, from_pixel;
  int64_t w_to, w_channel, w_t, w_r, w_s;
  int64_t to_channel, to_pixel;
};

// One product of every lane; compiled with vdpbf16ps, the sum of two: the words are pairs of bf16, see few.cpp.
CONVGRAD_INLINE void add_product(VecF& sum, VecF weight, VecF pixel) {
#if defined(__AVX512BF16__)
  sum = (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)weight, (__m512bh)(__m512)pixel);
#else
  sum += weight * pixel;
#endif
}
#if defined(__AVX512BF16__)
constexpr int64_t roundings = 2;  // of one add_product
#else
constexpr int64_t roundings = 1;
#endif
CONVGRAD_INLINE void add_product(VecD& sum, VecD weight, VecD pixel) { sum += weight * pixel; }

// to[k][p] = sum over channels and taps of w[k][...] * from[p + ...], for K vectors of P pixels in registers. A source
// of one lane (not Wide) is spread over all lanes as it is read. Blocked: the sums are long, see blocked_sums.h.
template <typename T, bool Wide, int K, int P, bool Blocked>
void sweep_tile(const Sweep& sweep, const T* from, const T* w, T* to) {
  using V = Vec<T>;
  V sum[K][P];
  for (int k = 0; k < K; ++k)
    for (int p = 0; p < P; ++p) sum[k][p] = V{};
  BlockedSums<V, K * P> blocks;
  const int64_t step = sweep.from_pixel, tap = sweep.from_s, w_tap = sweep.w_s, w_to = sweep.w_to;
  for (int64_t c = 0; c < sweep.channels; ++c)
    for (int64_t t = 0; t < sweep.t; ++t)
      for (int64_t r = 0; r < sweep.r; ++r) {
        const T* f = from + c * sweep.from_channel + t * sweep.from_t + r * sweep.from_r;
        const T* v = w + c * sweep.w_channel + t * sweep.w_t + r * sweep.w_r;
        for (int64_t left = sweep.s; left > 0;) {
          int64_t s = left < longest_chain / roundings ? left : longest_chain / roundings;
          if constexpr (Blocked) blocks.expect(sum[0], s * roundings);
          for (left -= s; s > 0; --s, f += tap, v += w_tap) {
            V weight[K];
            for (int k = 0; k < K; ++k) weight[k] = load<V>(v + k * w_to);
            for (int p = 0; p < P; ++p) {
              V pixel;
              if constexpr (Wide) pixel = load<V>(f + p * step);
              else pixel = splat<V>(f[p * step]);
              for (int k = 0; k < K; ++k) add_product(sum[k][p], weight[k], pixel);
            }
          }
        }
      }
  if constexpr (Blocked) blocks.finish(sum[0]);
  for (int k = 0; k < K; ++k)
    for (int p = 0; p < P; ++p) store(to + k * sweep.to_channel + p * sweep.to_pixel, sum[k][p]);
}

// The same for one channel where neighbouring taps read neighbouring pixels: S taps at a time, each pixel loaded once.
template <typename T, int P, int S, bool Blocked>
void slide_tile(const Sweep& sweep, const T* from, const T* w, T* to) {
  using V = Vec<T>;
  constexpr int L = lanes_of<T>;
  V sum[P];
  for (int p = 0; p < P; ++p) sum[p] = V{};
  BlockedSums<V, P> blocks;
  const int64_t w_tap = sweep.w_s;
  for (int64_t c = 0; c < sweep.channels; ++c)
    for (int64_t t = 0; t < sweep.t; ++t)
      for (int64_t r = 0; r < sweep.r; ++r) {
        const T* f = from + c * sweep.from_channel + t * sweep.from_t + r * sweep.from_r;
        const T* v = w + c * sweep.w_channel + t * sweep.w_t + r * sweep.w_r;
        int64_t left = sweep.s;
        for (; left >= S; left -= S, f += S * L, v += S * w_tap) {
          if constexpr (Blocked) blocks.expect(sum, S);
          V weight[S];
#pragma GCC unroll 16
          for (int s = 0; s < S; ++s) weight[s] = load<V>(v + s * w_tap);
#pragma GCC unroll 32
          for (int i = 0; i < P + S - 1; ++i) {
            const V pixel = load<V>(f + i * L);
#pragma GCC unroll 16
            for (int s = 0; s < S; ++s)
              if (i - s >= 0 && i - s < P) sum[i - s] += weight[s] * pixel;
          }
        }
        for (; left > 0; --left, f += L, v += w_tap) {
          if constexpr (Blocked) blocks.expect(sum, 1);
          const V weight = load<V>(v);
#pragma GCC unroll 16
          for (int p = 0; p < P; ++p) sum[p] += weight * load<V>(f + p * L);
        }
      }
  if constexpr (Blocked) blocks.finish(sum);
  for (int p = 0; p < P; ++p) store(to + p * sweep.to_pixel, sum[p]);
}

template <typename T> using SweepTile = void (*)(const Sweep&, const T*, const T*, T*);
constexpr int most_slide_taps = 8;
constexpr int blocked_slide_taps = 4, widest_blocked = 8;  // of long sums: one part at a time

template <typename T, bool Wide, int K, bool Blocked, int... P>
constexpr auto tile_table(std::integer_sequence<int, P...>) {
  struct { SweepTile<T> of[sizeof...(P)]; } table = {{sweep_tile<T, Wide, K, P + 1, Blocked>...}};
  return table;
}
template <typename T, int S, bool Blocked, int... P>
constexpr auto slide_table(std::integer_sequence<int, P...>) {
  struct { SweepTile<T> of[sizeof...(P)]; } table = {{slide_tile<T, P + 1, S, Blocked>...}};
  return table;
}
template <typename T, bool Wide, int K>
constexpr auto tiles = tile_table<T, Wide, K, false>(std::make_integer_sequence<int, widest_tile[K]>());
template <typename T, int S>
constexpr auto slides = slide_table<T, S, false>(std::make_integer_sequence<int, widest_slide>());
template <typename T, bool Wide>
constexpr auto blocked_tiles = tile_table<T, Wide, 1, true>(std::make_integer_sequence<int, widest_blocked>());
template <typename T>
constexpr auto blocked_slides =
    slide_table<T, blocked_slide_taps, true>(std::make_integer_sequence<int, widest_blocked>());

template <typename T, bool Wide>
const SweepTile<T>* sweeping_tiles(int64_t parts) {
  if constexpr (most_parts >= 4)
    if (parts == 4) return tiles<T, Wide, 4>.of;
  return parts == 3 ? tiles<T, Wide, 3>.of : parts == 2 ? tiles<T, Wide, 2>.of : tiles<T, Wide, 1>.of;
}

// The tiles, by width - 1, that slide over `taps` taps: the number of taps at a time that leaves the fewest over.
template <typename T>
const SweepTile<T>* sliding_tiles(int64_t taps) {
  int best = 3;
  for (int s = 4; s <= most_slide_taps; ++s)
    if (taps - taps % s >= taps - taps % best) best = s;
  switch (best) {
    case 3: return slides<T, 3>.of;
    case 4: return slides<T, 4>.of;
    case 5: return slides<T, 5>.of;
    case 6: return slides<T, 6>.of;
    case 7: return slides<T, 7>.of;
    default: return slides<T, 8>.of;
  }
}

// One batch of destination rows: every x phase into the scratch rows, which then leave lane form together.
template <typename T>
struct BatchJob {
  static constexpr int L = lanes_of<T>;
  const LaneCorrelation& job;
  const int64_t source_lanes;
  int64_t slab_row, slab_plane, slab_pass;  // elements
  int64_t rows_here = 0, rows_pass;
  bool blocked;  // the sums are long
  Sweep sweep{};
  struct RowStart { int64_t t, r, from, w; } start[most_batch];  // t = 0: no tap reaches the row

  explicit BatchJob(const LaneCorrelation& j) : job(j), source_lanes(j.broadcast ? 1 : L) {
    slab_row = j.source_box.extent[2] * source_lanes;
    slab_plane = j.source_box.extent[1] * slab_row;
    sweep.channels = j.source_channels;
    sweep.from_channel = j.source_box.extent[0] * slab_plane;
    slab_pass = sweep.channels * sweep.from_channel;
    sweep.w_to = j.weight_to * L;
    sweep.w_channel = j.weight_from * L;
    sweep.to_channel = j.batch * j.to_box.extent[2] * L;
    rows_pass = j.parts * sweep.to_channel;
    int64_t longest = j.source_channels * roundings;
    for (int axis = 0; axis < 3; ++axis) {
      int64_t taps = 0;
      for (int64_t i = 0; i < j.phases[axis]; ++i) taps = j.phase[axis][i].taps > taps ? j.phase[axis][i].taps : taps;
      longest *= taps;
    }
    blocked = longest > longest_whole;
  }

  // The taps of axis z or y that reach position `at`; moves the row's start to the first of them.
  int64_t take_axis(int axis, int64_t at, int64_t line, RowStart& row, int64_t& from_step, int64_t& w_step) const {
    const LanePhase& phase = job.phase[axis][at % job.phases[axis]];
    const int64_t j = (at - phase.first) / phase.step, w_tap = job.weight_tap[axis] * L;
    const TapRange taps = landing(phase, j, job.source_size[axis]);
    from_step = phase.source_tap_step * line;
    w_step = phase.tap_step * w_tap;
    const int64_t source = phase.source + j * phase.source_step + taps.low * phase.source_tap_step;
    row.from += (source - job.source_box.first[axis]) * line;
    row.w += (phase.tap_first + taps.low * phase.tap_step) * w_tap;
    return taps.high - taps.low;
  }

  void zero(T* rows, int64_t row, int64_t first, int64_t step, int64_t pixels) const {
    for (int64_t k = 0; k < job.parts; ++k)
      for (int64_t p = 0; p < pixels; ++p)
        store(rows + k * sweep.to_channel + (row * job.to_box.extent[2] + first + p * step) * L, Vec<T>{});
  }

  // One tile of every row: what a tile reads of one row it reads again of the next, from the first-level cache.
  void tile_of_rows(SweepTile<T> tile, const T* from, const T* w, T* to) {
    for (int64_t y = 0; y < rows_here; ++y) {
      if (!start[y].t) continue;
      sweep.t = start[y].t;
      sweep.r = start[y].r;
      tile(sweep, from + start[y].from, w + start[y].w, to + y * job.to_box.extent[2] * L);
    }
  }

  void tiles_of_rows(const SweepTile<T>* tile, int widest, const T* from, const T* w, T* to, int64_t pixels) {
    const int64_t count = (pixels + widest - 1) / widest;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = pixels * i / count, width = pixels * (i + 1) / count - first;
      tile_of_rows(tile[width - 1], from + first * sweep.from_pixel, w, to + first * sweep.to_pixel);
    }
  }

  void parts_of_rows(const T* from, const T* w, T* to, int64_t pixels) {
    const bool slides_down = sweep.from_s == -sweep.from_pixel;
    const bool neighbours = sweep.from_pixel == L && (slides_down || sweep.from_s == L);
    if (job.parts == 1 && !job.broadcast && neighbours && sweep.s >= 3) {
      const Sweep kept = sweep;
      if (slides_down) {  // start at the last tap
        from += (sweep.s - 1) * sweep.from_s;
        w += (sweep.s - 1) * sweep.w_s;
        sweep.from_s = L;
        sweep.w_s = -sweep.w_s;
      }
      if (blocked) tiles_of_rows(blocked_slides<T>.of, widest_blocked, from, w, to, pixels);
      else tiles_of_rows(sliding_tiles<T>(sweep.s), widest_slide, from, w, to, pixels);
      sweep = kept;
      return;
    }
    for (int64_t part = 0; blocked && part < job.parts; ++part)
      tiles_of_rows(job.broadcast ? blocked_tiles<T, false>.of : blocked_tiles<T, true>.of, widest_blocked, from,
                    w + part * sweep.w_to, to + part * sweep.to_channel, pixels);
    if (blocked) return;
    const int64_t count = (job.parts + most_parts - 1) / most_parts;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = job.parts * i / count, parts = job.parts * (i + 1) / count - first;
      const SweepTile<T>* tile = job.broadcast ? sweeping_tiles<T, false>(parts) : sweeping_tiles<T, true>(parts);
      tiles_of_rows(tile, widest_tile[parts], from, w + first * sweep.w_to, to + first * sweep.to_channel, pixels);
    }
  }

  void x_phase(const LanePhase& phase, const T* from, const T* w, T* rows, bool careful) {
    const int64_t begin = job.to_box.first[2], end = begin + job.to_box.extent[2];
    int64_t j = begin <= phase.first ? 0 : (begin - phase.first + phase.step - 1) / phase.step;
    const int64_t at = phase.first + j * phase.step;
    if (at >= end) return;
    const int64_t pixels = (end - 1 - at) / phase.step + 1;
    if (phase.taps == 0) {
      const int64_t count = job.images > 1 ? job.images : rows_here;
      for (int64_t y = 0; y < count; ++y) zero(rows, y, at - begin, phase.step, pixels);
      return;
    }
    const int64_t from_pixel = phase.source_step * source_lanes, to_pixel = phase.step * L;
    sweep.s = phase.taps;
    sweep.from_pixel = from_pixel;
    sweep.to_pixel = to_pixel;
    sweep.from_s = phase.source_tap_step * source_lanes;
    sweep.w_s = phase.tap_step * job.weight_tap[2] * L;
    from += (phase.source + j * phase.source_step - job.source_box.first[2]) * source_lanes;
    w += phase.tap_first * job.weight_tap[2] * L;
    T* to = rows + (at - begin) * L;
    if (!careful && job.images == 1) return parts_of_rows(from, w, to, pixels);
    if (job.images > 1) {
      sweep.from_pixel = job.slab_image;
      sweep.to_pixel = job.to_box.extent[2] * L;
    }
    for (int64_t p = 0; p < pixels; ++p, from += from_pixel, to += to_pixel) {
      const TapRange taps = careful ? landing(phase, j + p, job.source_size[2]) : TapRange{0, phase.taps};
      sweep.s = taps.high - taps.low;
      parts_of_rows(from + taps.low * sweep.from_s, w + taps.low * sweep.w_s, to, job.images);
    }
  }

  // The sums over the lanes of each vector leave as lines of pixels.
  void store_reduced(char* p, int64_t count) const {
    const LanePlanes& to = job.to;
    const int64_t width = job.to_box.extent[2], row_step = to.stride[job.images > 1 ? axis_n : axis_h];
    for (int64_t k = 0; k < job.parts; ++k)
      for (int64_t y = 0; y < count; ++y) {
        const T* row = static_cast<const T*>(job.rows) + k * sweep.to_channel + y * width * L;
        char* line = p + to.offset[0] + k * to.stride[axis_c] + y * row_step;
        for (int64_t x = 0; x < width; x += L) {
          const int64_t n = width - x < L ? width - x : L;
          Vec<T> r[L];
          for (int i = 0; i < L; ++i) r[i] = i < n ? load<Vec<T>>(row + (x + i) * L) : Vec<T>{};
          transpose<T>(r);
          for (int h = L / 2; h > 0; h /= 2)
            for (int i = 0; i < h; ++i) r[i] += r[i + h];
          alignas(64) T sums[L];
          store(sums, r[0]);
          encode_line(to.code, sums, n, line + x * to.stride[axis_w], to.stride[axis_w]);
        }
      }
  }

  template <typename E>
  void batch(int64_t z, int64_t y, int64_t count) {
    rows_here = job.images > 1 ? 1 : count;
    for (int64_t i = 0; i < rows_here; ++i) {
      start[i] = {0, 0, 0, 0};
      start[i].t = take_axis(0, z, slab_plane, start[i], sweep.from_t, sweep.w_t);
      start[i].r = take_axis(1, y + i, slab_row, start[i], sweep.from_r, sweep.w_r);
      if (start[i].r <= 0) start[i].t = 0;
    }
    const int64_t width = job.to_box.extent[2], *at = job.to.stride;
    char* p = job.to.data + z * at[axis_d] + y * at[axis_h] + job.to_box.first[2] * at[axis_w];
    // Short planes that cannot be streamed: their lines come while their values are computed.
    const bool fetch = !job.reduce && !job.broadcast && at[axis_w] == size_of(job.to.code.dtype) &&
                       (at[axis_c] % 64 || !job.to.stream);
    for (int64_t pass = 0; pass < job.passes; ++pass) {
      const T* from = static_cast<const T*>(job.slab) + pass * slab_pass;
      const T* w = static_cast<const T*>(job.weights) + pass * job.weight_pass * L;
      T* rows = static_cast<T*>(job.rows) + pass * rows_pass;
      if (fetch)
        for (int64_t k = 0; k < job.parts; ++k)
          fetch_starts<true>(job.to, pass, p + k * job.to.stride[axis_c], count * job.to.stride[axis_h]);
      for (int64_t i = 0; i < job.phases[2]; ++i) x_phase(job.phase[2][i], from, w, rows, !job.finite[pass]);
      for (int64_t i = 0; i < rows_here; ++i) {
        if (start[i].t) continue;
        for (int64_t image = 0; image < job.images; ++image) zero(rows, i + image, 0, 1, width);
      }
    }
    LanePlanes to = job.to;
    if (job.reduce) return store_reduced(p, count);
    int64_t stride[5];
    for (int a = 0; a < 5; ++a) stride[a] = to.stride[a];
    if (job.images > 1) stride[axis_h] = stride[axis_n];
    to.stride = stride;
    const int64_t block_step = job.broadcast ? sweep.to_channel : rows_pass;
    store_rows<E>(to, p, static_cast<const T*>(job.rows), {count, width, width * L, sweep.to_channel, block_step});
  }
};

template <typename E>
void correlate(const LaneCorrelation& job) {
  BatchJob<typename E::T> rows(job);
  const PixelBox& box = job.to_box;
  const int64_t step = job.images > 1 ? 1 : job.batch;
  for (int64_t z = 0; z < box.extent[0]; ++z)
    for (int64_t y = 0; y < box.extent[1]; y += step) {
      const int64_t left = box.extent[1] - y, rows_here = left < step ? left : step;
      rows.template batch<E>(box.first[0] + z, box.first[1] + y, job.images > 1 ? job.images : rows_here);
    }
#if CONVGRAD_VECTOR_BYTES == 64
  if (job.to.stream) _mm_sfence();
#endif
}

template <typename E>
void load_box(const LanePlanes& from, const PixelBox& box, const int64_t* size, typename E::T* slab) {
  using T = typename E::T;
  constexpr int L = lanes_of<T>;
  const int64_t pitch = box.extent[2] * L, plane = box.extent[1] * pitch, channel = box.extent[0] * plane;
  int64_t left = box.first[2] < 0 ? -box.first[2] : 0, right = box.first[2] + box.extent[2] - size[2];
  if (right < 0) right = 0;
  if (left > box.extent[2]) left = box.extent[2];
  if (right > box.extent[2]) right = box.extent[2];
  const int64_t inside = box.extent[2] - left - right;
  if (left || right) {
    for (int64_t i = 0; i < from.blocks * from.channels * box.extent[0] * box.extent[1]; ++i) {
      T* line = slab + i * pitch;
      for (int64_t x = 0; x < left; ++x) store(line + x * L, Vec<T>{});
      for (int64_t x = 0; x < right; ++x) store(line + (box.extent[2] - 1 - x) * L, Vec<T>{});
    }
  }
  if (inside <= 0) return;
  const LaneRows rows{box.extent[1], inside, pitch, channel, from.channels * channel};
  for (int64_t z = 0; z < box.extent[0]; ++z) {
    const char* p = from.data + (box.first[0] + z) * from.stride[axis_d] + box.first[1] * from.stride[axis_h] +
                    (box.first[2] + left) * from.stride[axis_w];
    load_rows<E>(from, p, slab + z * plane + left * L, rows);
  }
}

}  // namespace

#if defined(__AVX512BF16__)
void correlate_pairs(const LaneCorrelation& job) {
  if (job.to.code.dtype == Dtype::bf16) return correlate<AsBf16>(job);
  if (job.to.code.dtype == Dtype::f32) return correlate<AsF32>(job);
  correlate<AsLines>(job);
}
#else
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
#endif

}  // namespace convgrad::CONVGRAD_ISA
