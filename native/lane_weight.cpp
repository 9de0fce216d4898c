// Weight gradient in lane form: tiles of output channels by taps stay in registers while a box of pixels goes by.
#include "blocked_sums.h"
#include "lane_weight_box.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

#if CONVGRAD_VECTOR_BYTES == 64
constexpr int most_sums = 25;  // of 32 registers: the rest holds gradients and an input
#else
constexpr int most_sums = 12;  // of 16
#endif

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
  const int64_t step = v.x_pixel, x_s = S > 1 ? v.x_column[1] : 0, dy_channel = v.dy_channel;
  for (int64_t z = 0; z < v.planes; ++z)
    for (int64_t y = 0; y < v.rows; ++y) {
      const T* g = dy + z * v.dy_plane + y * v.dy_row;
      const T* p[R];
      for (int r = 0; r < R; ++r) p[r] = x + z * v.x_plane + y * v.x_row + v.x_line[r];
      for (int64_t q = v.pixels; q > 0; --q, g += pairing == dy_spread ? 1 : L) {
        V grad[K];
        for (int k = 0; k < K; ++k) grad[k] = take<T, pairing != dy_spread>(g + k * dy_channel);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          for (int s = 0; s < S; ++s) {
            const V pixel = take<T, pairing != x_spread>(p[r] + s * x_s);
            for (int k = 0; k < K; ++k) sum[k][r][s] += grad[k] * pixel;
          }
          p[r] += step;
        }
      }
    }
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        T* to = sums + k * v.sum_channel + v.sum_line[r] + s * v.sum_s;
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
VisitTile<T> shaped(int k, int r, int s) {
  return k == 4   ? tiles<T, pairing, 4>.of[r - 1][s - 1]
         : k == 3 ? tiles<T, pairing, 3>.of[r - 1][s - 1]
         : k == 2 ? tiles<T, pairing, 2>.of[r - 1][s - 1]
                  : tiles<T, pairing, 1>.of[r - 1][s - 1];
}

template <typename T>
struct LaneTiles {
  using X = T;
  using Dy = T;
  using Sum = T;
  static constexpr int most_sums = convgrad::CONVGRAD_ISA::most_sums, most_parts = sizeof(T) == 8 ? 1 : 4,
                       most_lines = sizeof(T) == 8 ? 1 : tallest_r;
  static constexpr double latency = 5.5;
  static constexpr int64_t roundings = 1;
  static VisitTile<T> tile(const LaneWeightGrad& job, int k, int r, int s) {
    return job.x_broadcast    ? shaped<T, x_spread>(k, r, s)
           : job.dy_broadcast ? shaped<T, dy_spread>(k, r, s)
                              : shaped<T, lane_by_lane>(k, r, s);
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
    BlockedSums<Vec<T>, 4> blocks;
    int64_t i = 0;
    for (; i + 4 <= vectors; i += 4, slab += 4 * L) {
      blocks.expect(part, 1);
      for (int j = 0; j < 4; ++j) part[j] += load<Vec<T>>(slab + j * L);
    }
    blocks.finish(part);
    for (; i < vectors; ++i, slab += L) part[0] += load<Vec<T>>(slab);
    store(sums, load<Vec<T>>(sums) + ((part[0] + part[1]) + (part[2] + part[3])));
  }
}

}  // namespace

void weight_grad_lanes(const LaneWeightGrad& job, bool f64) {
  if (f64) BoxJob<LaneTiles<double>>(job).run();
  else BoxJob<LaneTiles<float>>(job).run();
}

bool finite_lanes(const void* slab, int64_t vectors, bool f64) {
  return f64 ? finite(static_cast<const double*>(slab), vectors) : finite(static_cast<const float*>(slab), vectors);
}

void sum_lanes(const void* slab, int64_t channels, int64_t vectors, void* sums, bool f64) {
  if (f64) sum(static_cast<const double*>(slab), channels, vectors, static_cast<double*>(sums));
  else sum(static_cast<const float*>(slab), channels, vectors, static_cast<float*>(sums));
}

}  // namespace convgrad::CONVGRAD_ISA
