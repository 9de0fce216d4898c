// Weight gradient in lane form: tiles of output channels by taps stay in registers while a box of pixels goes by.
#include "lane_io.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

#if CONVGRAD_VECTOR_BYTES == 64
constexpr int most_sums = 25;  // of 32 registers: the rest holds gradients and an input
#else
constexpr int most_sums = 12;  // of 16
#endif
constexpr int widest_s = 8, tallest_r = 5;

// The pixels one tile visits: `rows` rows of `pixels`; steps in elements.
struct Visit {
  int64_t planes, rows, pixels;
  int64_t dy_channel, dy_plane, dy_row;
  int64_t x_plane, x_row, x_pixel;  // per step of the output position
  int64_t x_r, x_s;                 // per tap
  int64_t sum_channel, sum_r, sum_s;
};

// How the two slabs meet: lane by lane, or one of them has a single lane that is spread over all lanes of the other.
enum Pairing { lane_by_lane, x_spread, dy_spread };

template <typename T, bool Wide>
CONVGRAD_INLINE Vec<T> take(const T* p) {
  if constexpr (Wide) return load<Vec<T>>(p);
  else return splat<Vec<T>>(*p);
}

// sums[k][r][s] += sum over the pixels of dy[k] * x[r][s].
template <typename T, Pairing pairing, int K, int R, int S>
void visit_tile(const Visit& v, const T* dy, const T* x, T* sums) {
  using V = Vec<T>;
  constexpr int L = lanes_of<T>;
  V sum[K][R][S];
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) sum[k][r][s] = V{};
  const int64_t step = v.x_pixel, x_r = v.x_r, x_s = v.x_s, dy_channel = v.dy_channel;
  for (int64_t z = 0; z < v.planes; ++z)
    for (int64_t y = 0; y < v.rows; ++y) {
      const T* g = dy + z * v.dy_plane + y * v.dy_row;
      const T* p = x + z * v.x_plane + y * v.x_row;
      for (int64_t q = v.pixels; q > 0; --q, g += pairing == dy_spread ? 1 : L, p += step) {
        V grad[K];
        for (int k = 0; k < K; ++k) grad[k] = take<T, pairing != dy_spread>(g + k * dy_channel);
        for (int r = 0; r < R; ++r)
          for (int s = 0; s < S; ++s) {
            const V pixel = take<T, pairing != x_spread>(p + r * x_r + s * x_s);
            for (int k = 0; k < K; ++k) sum[k][r][s] += grad[k] * pixel;
          }
      }
    }
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        T* to = sums + k * v.sum_channel + r * v.sum_r + s * v.sum_s;
        store(to, load<V>(to) + sum[k][r][s]);
      }
}

template <typename T> using VisitTile = void (*)(const Visit&, const T*, const T*, T*);

template <typename T, Pairing pairing, int K, int R, int S>
constexpr VisitTile<T> tile_or_null() {
  constexpr bool made = K * R * S <= most_sums && (sizeof(T) == 4 || (K == 1 && R == 1));
  if constexpr (made) return visit_tile<T, pairing, K, R, S>;
  else return nullptr;
}
template <typename T, Pairing pairing, int K>
struct TileTable {
  VisitTile<T> of[tallest_r][widest_s];
  template <int... I>
  constexpr explicit TileTable(std::integer_sequence<int, I...>) : of{} {
    ((of[I / widest_s][I % widest_s] = tile_or_null<T, pairing, K, I / widest_s + 1, I % widest_s + 1>()), ...);
  }
};
template <typename T, Pairing pairing, int K>
constexpr TileTable<T, pairing, K> tiles{std::make_integer_sequence<int, tallest_r * widest_s>()};

template <typename T, Pairing pairing>
VisitTile<T> tile(int k, int r, int s) {
  return k == 4   ? tiles<T, pairing, 4>.of[r - 1][s - 1]
         : k == 3 ? tiles<T, pairing, 3>.of[r - 1][s - 1]
         : k == 2 ? tiles<T, pairing, 2>.of[r - 1][s - 1]
                  : tiles<T, pairing, 1>.of[r - 1][s - 1];
}

// The outputs of [first, first+count) whose input for tap k lies in the tensor, relative to `first`.
Range landing_from(const Geometry& g, int axis, int64_t k, int64_t first, int64_t count) {
  const Range outputs = landing(g, axis, k, first, count);
  return outputs.low < outputs.high ? Range{outputs.low - first, outputs.high - first} : Range{0, 0};
}

template <typename T>
struct BoxJob {
  const LaneWeightGrad& job;
  const Geometry& g;
  static constexpr int L = lanes_of<T>;
  Visit v{};
  const int64_t x_lanes, dy_lanes;
  int64_t x_channel;

  explicit BoxJob(const LaneWeightGrad& j)
      : job(j), g(*j.geo), x_lanes(j.x_broadcast ? 1 : L), dy_lanes(j.dy_broadcast ? 1 : L) {
    const int64_t x_row = j.x_box.extent[2] * x_lanes, x_plane = x_row * j.x_box.extent[1];
    x_channel = x_plane * j.x_box.extent[0];
    v.dy_row = j.dy_box.extent[2] * dy_lanes;
    v.dy_plane = v.dy_row * j.dy_box.extent[1];
    v.dy_channel = v.dy_plane * j.dy_box.extent[0];
    v.x_plane = x_plane * g.stride[0];
    v.x_row = x_row * g.stride[1];
    v.x_pixel = x_lanes * g.stride[2];
    v.x_r = x_row * g.dilation[1];
    v.x_s = x_lanes * g.dilation[2];
    v.sum_s = L;
    v.sum_r = L * g.kernel[2];
    v.sum_channel = L * g.taps() * j.sum_step;
    if (j.images > 1) {  // dy has one plane: images take the place of planes
      v.dy_plane = j.dy_image;
      v.x_plane = j.x_image;
    }
  }

  // Element offset in the x slab of output (z, y, q) of the box seen through tap (t, r, s).
  int64_t x_at(int64_t z, int64_t y, int64_t q, int64_t t, int64_t r, int64_t s) const {
    const int64_t out[3] = {z, y, q}, tap[3] = {t, r, s};
    int64_t at[3];
    for (int a = 0; a < 3; ++a)
      at[a] = (job.dy_box.first[a] + out[a]) * g.stride[a] + tap[a] * g.dilation[a] - g.pad[a] - job.x_box.first[a];
    return ((at[0] * job.x_box.extent[1] + at[1]) * job.x_box.extent[2] + at[2]) * x_lanes;
  }

  // Planes z, rows y, pixels q of the box for taps (t, r.., s..) of channels (k.., c).
  void visit(int64_t k, int kn, int64_t c, int64_t t, int64_t r, int rn, int64_t s, int sn, Range z, Range y, Range q) {
    v.planes = (z.high - z.low) * job.images;
    v.rows = y.high - y.low;
    v.pixels = q.high - q.low;
    if (v.planes <= 0 || v.rows <= 0 || v.pixels <= 0) return;
    const T* dy = static_cast<const T*>(job.dy) + k * v.dy_channel + z.low * v.dy_plane + y.low * v.dy_row +
                  q.low * dy_lanes;
    const T* x = static_cast<const T*>(job.x) + c * x_channel + x_at(z.low, y.low, q.low, t, r, s);
    T* sums = static_cast<T*>(job.sums) +
              ((k * job.sum_step + c) * g.taps() + (t * g.kernel[1] + r) * g.kernel[2] + s) * L;
    const VisitTile<T> visit = job.x_broadcast    ? tile<T, x_spread>(kn, rn, sn)
                               : job.dy_broadcast ? tile<T, dy_spread>(kn, rn, sn)
                                                  : tile<T, lane_by_lane>(kn, rn, sn);
    visit(v, dy, x, sums);
  }

  // A tile of rn x sn taps. Rows that some of its taps do not reach are visited tap row by tap row.
  void taps(int64_t k, int kn, int64_t c, int64_t t, int64_t r, int rn, int64_t s, int sn) {
    const Range z = landing_from(g, 0, t, job.dy_box.first[0], job.dy_box.extent[0]);
    const Range all{0, job.dy_box.extent[2]};
    Range common{0, job.dy_box.extent[1]};
    Range rows[tallest_r];
    for (int i = 0; i < rn; ++i) {
      rows[i] = landing_from(g, 1, r + i, job.dy_box.first[1], job.dy_box.extent[1]);
      if (rows[i].low > common.low) common.low = rows[i].low;
      if (rows[i].high < common.high) common.high = rows[i].high;
    }
    if (common.high <= common.low) common = {0, 0};
    visit(k, kn, c, t, r, rn, s, sn, z, common, all);
    if (rn == 1) return;
    for (int i = 0; i < rn; ++i) {
      if (common.high == 0) {
        visit(k, kn, c, t, r + i, 1, s, sn, z, rows[i], all);
      } else {
        visit(k, kn, c, t, r + i, 1, s, sn, z, {rows[i].low, common.low}, all);
        visit(k, kn, c, t, r + i, 1, s, sn, z, {common.high, rows[i].high}, all);
      }
    }
  }

  void careful_tap(int64_t k, int64_t c, int64_t t, int64_t r, int64_t s) {
    Range land[3];
    const int64_t tap[3] = {t, r, s};
    for (int a = 0; a < 3; ++a) land[a] = landing_from(g, a, tap[a], job.dy_box.first[a], job.dy_box.extent[a]);
    visit(k, 1, c, t, r, 1, s, 1, land[0], land[1], land[2]);
  }

  // The tile shape (out parts, taps in y, taps in x) with the fewest cycles: one per product or load, and never fewer
  // than the latency of a chain of sums.
  void choose_tile(int& kn, int& rn, int& sn) const {
    const int64_t K = job.out_parts, R = g.kernel[1], S = g.kernel[2];
    double best = -1;
    for (int k = 1; k <= (sizeof(T) == 8 ? 1 : 4); ++k)
      for (int r = 1; r <= (sizeof(T) == 8 ? 1 : tallest_r); ++r)
        for (int s = 1; s <= widest_s; ++s) {
          if (k * r * s > most_sums || k > K || r > R || s > S) continue;
          // Border rows are visited once for each of r: a small price on each.
          const double loads = k + r * s, products = k * r * s, rows = r > 1 ? 1.02 + 0.01 * r : 1;
          const double tile = ((products > loads ? products : loads) + 1.5) * rows;
          const double tiles_here = double((K + k - 1) / k * ((R + r - 1) / r) * ((S + s - 1) / s));
          const double cost = tiles_here * (tile < 5.5 ? 5.5 : tile);
          if (best < 0 || cost < best) best = cost, kn = k, rn = r, sn = s;
        }
  }

  void run() {
    const int64_t R = g.kernel[1], S = g.kernel[2], K = job.out_parts;
    int kn_most = 1, rn_most = 1, sn_most = 1;
    if (job.dy_finite) choose_tile(kn_most, rn_most, sn_most);
    for (int64_t k = 0; k < K; k += kn_most) {
      const int kn = K - k < kn_most ? int(K - k) : kn_most;
      for (int64_t c = 0; c < job.in_parts; ++c)
        for (int64_t t = 0; t < g.kernel[0]; ++t)
          for (int64_t r = 0; r < R; r += rn_most)
            for (int64_t s = 0; s < S; s += sn_most) {
              const int rn = R - r < rn_most ? int(R - r) : rn_most, sn = S - s < sn_most ? int(S - s) : sn_most;
              if (job.dy_finite) taps(k, kn, c, t, r, rn, s, sn);
              else careful_tap(k, c, t, r, s);
            }
    }
  }
};

template <typename T>
bool finite(const T* slab, int64_t vectors) {
  Vec<T> zero{};
  for (int64_t i = 0; i < vectors; ++i) zero += load<Vec<T>>(slab + i * lanes_of<T>) * T(0);
  for (int l = 0; l < lanes_of<T>; ++l)
    if (zero[l] != 0) return false;
  return true;
}

template <typename T>
void sum(const T* slab, int64_t channels, int64_t vectors, T* sums) {
  constexpr int L = lanes_of<T>;
  for (int64_t c = 0; c < channels; ++c, sums += L) {
    Vec<T> part[4] = {};
    int64_t i = 0;
    for (; i + 4 <= vectors; i += 4, slab += 4 * L)
      for (int j = 0; j < 4; ++j) part[j] += load<Vec<T>>(slab + j * L);
    for (; i < vectors; ++i, slab += L) part[0] += load<Vec<T>>(slab);
    store(sums, load<Vec<T>>(sums) + ((part[0] + part[1]) + (part[2] + part[3])));
  }
}

}  // namespace

void weight_grad_lanes(const LaneWeightGrad& job, bool f64) {
  if (f64) BoxJob<double>(job).run();
  else BoxJob<float>(job).run();
}

bool finite_lanes(const void* slab, int64_t vectors, bool f64) {
  return f64 ? finite(static_cast<const double*>(slab), vectors) : finite(static_cast<const float*>(slab), vectors);
}

void sum_lanes(const void* slab, int64_t channels, int64_t vectors, void* sums, bool f64) {
  if (f64) sum(static_cast<const double*>(slab), channels, vectors, static_cast<double*>(sums));
  else sum(static_cast<const float*>(slab), channels, vectors, static_cast<float*>(sums));
}

}  // namespace convgrad::CONVGRAD_ISA
