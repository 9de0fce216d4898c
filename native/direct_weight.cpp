// Weight gradient of depthwise convolutions where the tensors lie, channels last; see direct.h.
#include <utility>

#include "direct_units.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

#if CONVGRAD_VECTOR_BYTES == 64
constexpr int most_sums = 25, registers = 32;
#else
constexpr int most_sums = 10, registers = 16;
#endif
constexpr int tap_rows[] = {1, 2, 3, 5}, tap_columns[] = {1, 2, 3, 4, 5, 7};  // of a tile

// The rows and pixels of dy that a tile of taps visits; steps in bytes.
struct Visit {
  int64_t rows, pixels;
  int64_t dy_row, dy_pixel, x_row, x_pixel;  // per output position
  int64_t x_r, x_s;                          // per tap
  int64_t step, tap_step;                    // input pixels per output pixel and per tap
  int64_t first, size;                       // the input pixel of output pixel 0 and tap 0; input pixels of a row
  int64_t inner_low, inner_high;             // output pixels whose taps all land
  // What the next box will read, fetched line after line, whatever order the tiles have: the hardware sees streams.
  const char *dy_next, *x_next;              // null: nothing to fetch
  int64_t x_lines;                           // per line of dy
  int64_t sum_r, sum_s;                      // floats
};

// NOTE: into the second-level cache only: fetches into the first would hold the buffers that its own misses need
// (mobilenetv2_dw_32_112 f32 on Zen 4: 7.9 -> 4.9 ms).
CONVGRAD_INLINE void fetch(Visit& v, int pixels, int bytes) {
  if (!v.dy_next) return;
  for (int i = 0; i < pixels; ++i) __builtin_prefetch(v.dy_next + i * bytes, 0, 2);
  for (int i = 0; i < pixels * v.x_lines; ++i) __builtin_prefetch(v.x_next + i * bytes, 0, 2);
  v.dy_next += pixels * bytes;
  v.x_next += pixels * v.x_lines * bytes;
}

// sums[r][s] += sum over the pixels of dy * x[r][s]. Sliding: neighbouring taps and outputs read neighbouring inputs.
template <typename U, int R, int S, bool Slide>
void visit_tile(Visit& v, const char* dy, const char* x, float* sums) {
  constexpr int K = U::vectors;
  constexpr int free_vectors = (registers - 1 - R * S * K - K) / K;
  constexpr int most = !Slide ? 1 : free_vectors > 6 ? 6 : free_vectors < 2 ? 2 : free_vectors;  // pixels at once
  VecF sum[R][S][K] = {};
  for (int64_t y = 0; y < v.rows; ++y, dy += v.dy_row, x += v.x_row) {
    const char *g = dy, *p = x;
    const auto edge = [&](int64_t from, int64_t to) {
      g = dy + from * v.dy_pixel;
      p = x + from * v.x_pixel;
      for (int64_t q = from; q < to; ++q, g += v.dy_pixel, p += v.x_pixel) {
        VecF grad[K];
        U::load(g, grad);
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) {
          if (uint64_t(v.first + q * v.step + s * v.tap_step) >= uint64_t(v.size)) continue;
          for (int r = 0; r < R; ++r) {
            VecF pixel[K];
            U::load(p + r * v.x_r + s * v.x_s, pixel);
            for (int k = 0; k < K; ++k) sum[r][s][k] += grad[k] * pixel[k];
          }
        }
      }
    };
    edge(0, v.inner_low);
    int64_t q = v.inner_low;
    g = dy + q * v.dy_pixel;
    p = x + q * v.x_pixel;
    const auto inner = [&]<int Q>() __attribute__((always_inline)) {
      for (; q + Q <= v.inner_high; q += Q, g += Q * v.dy_pixel, p += Q * v.x_pixel) {
        VecF grad[Q][K];
#pragma GCC unroll 8
        for (int i = 0; i < Q; ++i) U::load(g + i * v.dy_pixel, grad[i]);
        fetch(v, Q, U::bytes);
#pragma GCC unroll 5
        for (int r = 0; r < R; ++r) {
          if constexpr (Slide) {
#pragma GCC unroll 16
            for (int i = 0; i < Q + S - 1; ++i) {
              VecF pixel[K];
              U::load(p + r * v.x_r + i * v.x_pixel, pixel);
#pragma GCC unroll 8
              for (int s = 0; s < S; ++s)
                if (i - s >= 0 && i - s < Q)
                  for (int k = 0; k < K; ++k) sum[r][s][k] += grad[i - s][k] * pixel[k];
            }
          } else {
#pragma GCC unroll 8
            for (int s = 0; s < S; ++s) {
              VecF pixel[K];
              U::load(p + r * v.x_r + s * v.x_s, pixel);
              for (int k = 0; k < K; ++k) sum[r][s][k] += grad[0][k] * pixel[k];
            }
          }
        }
      }
    };
    inner.template operator()<most>();
    if constexpr (most > 2) inner.template operator()<2>();
    edge(q, v.pixels);
  }
  for (int r = 0; r < R; ++r)
    for (int s = 0; s < S; ++s)
      for (int k = 0; k < K; ++k) {
        float* to = sums + r * v.sum_r + s * v.sum_s + k * lanes_f;
        store(to, load<VecF>(to) + sum[r][s][k]);
      }
}

using Tile = void (*)(Visit&, const char*, const char*, float*);
constexpr int row_choices = int(std::size(tap_rows)), column_choices = int(std::size(tap_columns));

template <typename U, int R, int S, bool Slide>
constexpr Tile tile_or_null() {
  constexpr bool made = R * S * U::vectors <= most_sums && (!Slide || S > 1);
  if constexpr (made) return visit_tile<U, R, S, Slide>;
  else return nullptr;
}
template <typename U, bool Slide>
struct TileTable {
  Tile of[row_choices][column_choices];
  template <int... I>
  constexpr explicit TileTable(std::integer_sequence<int, I...>) : of{} {
    ((of[I / column_choices][I % column_choices] =
          tile_or_null<U, tap_rows[I / column_choices], tap_columns[I % column_choices], Slide>()), ...);
  }
};
template <typename U, bool Slide>
constexpr TileTable<U, Slide> tiles{std::make_integer_sequence<int, row_choices * column_choices>()};

struct Range { int64_t low, high; };

// The outputs of [first, first+count) whose input for tap k lies in the tensor.
Range landing(const Geometry& g, int axis, int64_t k, int64_t first, int64_t count) {
  const int64_t shift = k * g.dilation[axis] - g.pad[axis], stride = g.stride[axis];
  const int64_t low_at = shift < 0 ? (-shift + stride - 1) / stride : 0, room = g.in[axis] - 1 - shift;
  const int64_t high_at = room < 0 ? 0 : room / stride + 1;
  const int64_t low = low_at > first ? low_at : first;
  const int64_t high = high_at < first + count ? high_at : first + count;
  return {low, low < high ? high : low};
}

template <typename U>
struct WeightJob {
  const DirectWeightGrad& job;
  const Geometry& g;
  const int64_t unit;
  Visit v{};
  const char *dy_next, *x_next;

  explicit WeightJob(const DirectWeightGrad& j) : job(j), g(*j.geo), unit(j.units.unit()) {
    v.pixels = j.pixels;
    v.dy_row = j.dy_stride[axis_h];
    v.dy_pixel = j.dy_stride[axis_w];
    v.x_row = j.x_stride[axis_h] * g.stride[1];
    v.x_pixel = j.x_stride[axis_w] * g.stride[2];
    v.x_r = j.x_stride[axis_h] * g.dilation[1];
    v.x_s = j.x_stride[axis_w] * g.dilation[2];
    v.step = g.stride[2];
    v.tap_step = g.dilation[2];
    v.size = g.in[2];
    // What comes next lies beside this box, or below it: `unread` positions of x are known already.
    const bool part = j.pixels < g.out[2];
    const int64_t y = j.first * g.stride[1] - g.pad[1] + (part ? 0 : (g.kernel[1] - 1) * g.dilation[1]);
    const int64_t x = j.first_pixel * g.stride[2] - g.pad[2] + (part ? (g.kernel[2] - 1) * g.dilation[2] : 0);
    const int64_t z = j.z * g.stride[0] + (g.kernel[0] - 1) * g.dilation[0] - g.pad[0];
    dy_next = j.dy + j.z * j.dy_stride[axis_d] + j.first * v.dy_row + j.first_pixel * v.dy_pixel +
              (part ? j.pixels * v.dy_pixel : j.rows * v.dy_row);
    x_next = j.x + z * j.x_stride[axis_d] + y * j.x_stride[axis_h] + x * j.x_stride[axis_w] +
             (part ? j.pixels * v.x_pixel : j.rows * v.x_row);
    v.x_lines = g.stride[2] * (part ? 1 : g.stride[1]);
    v.sum_s = unit;
    v.sum_r = unit * g.kernel[2];
  }

  bool slides() const { return g.stride[2] == 1 && g.dilation[2] == 1; }

  // The largest choice that is at most `left` and, with `other`, leaves registers enough; an index.
  static int fitting(const int* choices, int count, int64_t left, int other) {
    int best = 0;
    for (int i = 0; i < count; ++i)
      if (choices[i] <= left && choices[i] * other * U::vectors <= most_sums) best = i;
    return best;
  }

  // Rows [y.low, y.high) of dy with a tile of taps.
  void visit(int64_t channel, int64_t t, int64_t r, int r_index, int64_t s, int s_index, Range y, float* sums) {
    if (y.low >= y.high) return;
    const int sn = tap_columns[s_index];
    v.rows = y.high - y.low;
    v.first = job.first_pixel * g.stride[2] + s * g.dilation[2] - g.pad[2];
    const Range first = landing(g, 2, s, job.first_pixel, v.pixels);
    const Range last = landing(g, 2, s + sn - 1, job.first_pixel, v.pixels);
    v.inner_low = (last.low > first.low ? last.low : first.low) - job.first_pixel;
    v.inner_high = (last.high < first.high ? last.high : first.high) - job.first_pixel;
    if (v.inner_low >= v.inner_high) v.inner_low = v.inner_high = v.pixels;
    const int64_t in_z = job.z * g.stride[0] + t * g.dilation[0] - g.pad[0];
    const int64_t in_y = y.low * g.stride[1] + r * g.dilation[1] - g.pad[1];
    const char* dy = job.dy + channel + job.z * job.dy_stride[axis_d] + y.low * job.dy_stride[axis_h] +
                     job.first_pixel * v.dy_pixel;
    const char* x = job.x + channel + in_z * job.x_stride[axis_d] + in_y * job.x_stride[axis_h] +
                    v.first * job.x_stride[axis_w];
    const Tile tile = slides() && sn > 1 ? tiles<U, true>.of[r_index][s_index] : tiles<U, false>.of[r_index][s_index];
    tile(v, dy, x, sums + ((t * g.kernel[1] + r) * g.kernel[2] + s) * unit);
  }

  // A tile of taps. Rows that some of its taps do not reach are visited tap row by tap row.
  void taps(int64_t channel, int64_t t, int64_t r, int r_index, int64_t s, int s_index, float* sums) {
    const int rn = tap_rows[r_index];
    Range common{job.first, job.first + job.rows}, rows[8];
    for (int i = 0; i < rn; ++i) {
      rows[i] = landing(g, 1, r + i, job.first, job.rows);
      if (rows[i].low > common.low) common.low = rows[i].low;
      if (rows[i].high < common.high) common.high = rows[i].high;
    }
    const bool some = common.low < common.high;
    visit(channel, t, r, r_index, s, s_index, common, sums);
    if (v.dy_next) dy_next = v.dy_next, x_next = v.x_next;
    v.dy_next = v.x_next = nullptr;
    if (rn == 1) return;
    for (int i = 0; i < rn; ++i) {
      visit(channel, t, r + i, 0, s, s_index, {rows[i].low, some ? common.low : rows[i].high}, sums);
      if (some) visit(channel, t, r + i, 0, s, s_index, {common.high, rows[i].high}, sums);
    }
  }

  void sum_rows(int64_t channel, float* sums) const {
    constexpr int K = U::vectors;
    VecF sum[4][K] = {};
    for (int64_t y = job.first; y < job.first + job.rows; ++y) {
      const char* p = job.dy + channel + job.z * job.dy_stride[axis_d] + y * v.dy_row + job.first_pixel * v.dy_pixel;
      for (int64_t q = 0; q < v.pixels; ++q, p += v.dy_pixel) {
        VecF grad[K];
        U::load(p, grad);
        for (int k = 0; k < K; ++k) sum[q % 4][k] += grad[k];
      }
    }
    for (int k = 0; k < K; ++k) {
      const VecF total = (sum[0][k] + sum[1][k]) + (sum[2][k] + sum[3][k]);
      store(sums + k * lanes_f, load<VecF>(sums + k * lanes_f) + total);
    }
  }

  void run() {
    const int64_t T = g.kernel[0], R = g.kernel[1], S = g.kernel[2], entries = T * R * S + job.bias;
    // The tile of taps with the most sums: long rows of taps share more of what is read.
    const int s_most = fitting(tap_columns, column_choices, S, 1);
    const int r_most = fitting(tap_rows, row_choices, R, tap_columns[s_most]);
    for (int64_t u = 0; u < job.units.units(); ++u) {
      const int64_t channel = job.units.first(u) * (U::bytes / unit);
      float* sums = job.sums + u * entries * unit;
      v.dy_next = dy_next;  // the tile that comes first fetches
      v.x_next = x_next;
      for (int64_t t = 0; t < T; ++t) {
        if (landing(g, 0, t, job.z, 1).high == landing(g, 0, t, job.z, 1).low) continue;
        for (int64_t r = 0; r < R;) {
          const int r_index = fitting(tap_rows, row_choices, R - r < tap_rows[r_most] ? R - r : tap_rows[r_most],
                                      tap_columns[s_most]);
          for (int64_t s = 0; s < S;) {
            const int s_index = fitting(tap_columns, column_choices, S - s, tap_rows[r_index]);
            taps(channel, t, r, r_index, s, s_index, sums);
            s += tap_columns[s_index];
          }
          r += tap_rows[r_index];
        }
      }
      if (job.bias) sum_rows(channel, sums + (entries - 1) * unit);
    }
  }
};

}  // namespace

void weight_grad_direct(const DirectWeightGrad& job) {
  switch (job.units.dtype) {
    case Dtype::bf16: return WeightJob<UnitBf16>(job).run();
#if defined(__F16C__)
    case Dtype::f16: return WeightJob<UnitF16>(job).run();
#endif
    default: return WeightJob<UnitF32>(job).run();
  }
}

}  // namespace convgrad::CONVGRAD_ISA
