// Weight gradient of depthwise convolutions where the tensors lie, channels last; see direct.h.
#include <utility>

#include "blocked_sums.h"
#include "direct_units.h"
#include "direct_visits.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

#if CONVGRAD_VECTOR_BYTES == 64
constexpr int most_sums = 25, registers = 32;
#else
constexpr int most_sums = 10, registers = 16;
#endif
constexpr int tap_rows[] = {1, 2, 3, 5}, tap_columns[] = {1, 2, 3, 4, 5, 7};  // of a tile

// sums[r][s] += sum over the pixels of dy * x[r][s]. Sliding: neighbouring taps and outputs read neighbouring inputs.
template <typename U, int R, int S, bool Slide>
void visit_tile(Visit& v, const char* dy, const char* x, float* sums) {
  constexpr int K = U::vectors;
  constexpr int free_vectors = (registers - 1 - R * S * K - K) / K;
  constexpr int most = !Slide ? 1 : free_vectors > 6 ? 6 : free_vectors < 2 ? 2 : free_vectors;  // pixels at once
  // Whole rows of a convolution that keeps their width: which taps land at their ends is known, nothing is asked.
  constexpr int pad = (S - 1) / 2, narrow = 7, first = most + pad <= narrow ? most : narrow - pad;
  constexpr bool ends = Slide && S % 2 == 1 && pad > 0 && first >= pad;
  const bool whole = ends && v.first == -pad && v.pixels == v.size && v.pixels >= narrow;
  VecF sum[R][S][K];  // NOTE: GCC 12 would clear "= {}" in memory, string by string
#pragma GCC unroll 64
  for (int i = 0; i < R * S * K; ++i) sum[i / (S * K)][i / K % S][i % K] = VecF{};
  int64_t in_y = v.y_first;
  for (int64_t y = 0; y < v.rows; ++y, dy += v.dy_row, x += v.x_row, in_y += v.y_step) {
    const char *g = dy, *p = x;
    unsigned lands = 0;  // a bit per row of taps
    for (int r = 0; r < R; ++r) lands |= unsigned(uint64_t(in_y + r * v.y_tap_step) < uint64_t(v.y_size)) << r;
    const auto edge = [&](int64_t from, int64_t to) {
      g = dy + from * v.dy_pixel;
      p = x + from * v.x_pixel;
      for (int64_t q = from; q < to; ++q, g += v.dy_pixel, p += v.x_pixel) {
        VecF grad[K];
        U::load(g, grad);
#pragma GCC unroll 8
        for (int s = 0; s < S; ++s) {
          if (uint64_t(v.first + q * v.step + s * v.tap_step) >= uint64_t(v.size)) continue;
#pragma GCC unroll 5
          for (int r = 0; r < R; ++r) {
            if (!(lands >> r & 1)) continue;
            VecF pixel[K];
            U::load(p + r * v.x_r + s * v.x_s, pixel);
            for (int k = 0; k < K; ++k) sum[r][s][k] += grad[k] * pixel[k];
          }
        }
      }
    };
    // Q pixels; at an end of a row `pad` inputs do not exist.
    const auto block = [&]<int Q, bool Left, bool Right>() __attribute__((always_inline)) {
      VecF grad[Q][K];
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) {
        U::load(g + i * v.dy_pixel, grad[i]);
      }
      fetch(v, Q, U::bytes);
#pragma GCC unroll 5
      for (int r = 0; r < R; ++r) {
        if (!(lands >> r & 1)) continue;
        if constexpr (Slide) {
#pragma GCC unroll 16
          for (int i = Left ? pad : 0; i < Q + S - 1 - (Right ? pad : 0); ++i) {
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
      g += Q * v.dy_pixel;
      p += Q * v.x_pixel;
    };
    int64_t q = 0, end = v.inner_high;
    if (ends && whole) {
      if constexpr (ends) block.template operator()<first, true, false>();
      q = first;
      end = v.pixels - pad;
    } else {
      edge(0, v.inner_low);
      q = v.inner_low;
      g = dy + q * v.dy_pixel;
      p = x + q * v.x_pixel;
    }
    for (; q + most <= end; q += most) block.template operator()<most, false, false>();
    if constexpr (most > 2)
      for (; q + 2 <= end; q += 2) block.template operator()<2, false, false>();
    if (ends && whole) {
      if constexpr (ends) {
        if (q < end) block.template operator()<1, false, false>();
        block.template operator()<pad, false, true>();
      }
    } else {
      edge(q, v.pixels);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int s = 0; s < S; ++s)
      for (int k = 0; k < K; ++k) {
        float* to = sums + r * v.sum_r + s * v.sum_s + k * lanes_f;
        store(to, load<VecF>(to) + sum[r][s][k]);
      }
}

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

// The tiles of a unit, as direct_visits.h wants them.
template <typename U>
struct ChannelTiles {
  static constexpr const auto& rows = tap_rows;
  static constexpr const auto& columns = tap_columns;
  static constexpr int most_taps = most_sums / U::vectors, words = 1;
  static constexpr bool asks_rows = true;
  static int64_t chunks(const DirectUnits&) { return 1; }
  static void prepare(const DirectUnits&, Visit&) {}
  static Tile tile(bool slide, int r, int s) { return slide ? tiles<U, true>.of[r][s] : tiles<U, false>.of[r][s]; }
  static void sum_rows(const DirectWeightGrad& job, const Visit& v, int64_t channel, float* sums) {
    constexpr int K = U::vectors;
    VecF sum[4][K] = {};
    BlockedSums<VecF, 4 * K> blocks;
    for (int64_t y = job.first; y < job.first + job.rows; ++y) {
      const char* p = job.dy + channel + job.z * job.dy_stride[axis_d] + y * v.dy_row + job.first_pixel * v.dy_pixel;
      for (int64_t q = 0; q < job.pixels; ++q, p += v.dy_pixel) {
        if (q % 4 == 0) blocks.expect(sum[0], 1);
        VecF grad[K];
        U::load(p, grad);
        for (int k = 0; k < K; ++k) sum[q % 4][k] += grad[k];
      }
    }
    blocks.finish(sum[0]);
    for (int k = 0; k < K; ++k) {
      const VecF total = (sum[0][k] + sum[1][k]) + (sum[2][k] + sum[3][k]);
      store(sums + k * lanes_f, load<VecF>(sums + k * lanes_f) + total);
    }
  }
};

}  // namespace

void weight_grad_direct(const DirectWeightGrad& job) {
  switch (job.units.dtype) {
    case Dtype::bf16: return WeightJob<ChannelTiles<UnitBf16>>(job).run();
#if defined(__F16C__)
    case Dtype::f16: return WeightJob<ChannelTiles<UnitF16>>(job).run();
#endif
    default: return WeightJob<ChannelTiles<UnitF32>>(job).run();
  }
}

}  // namespace convgrad::CONVGRAD_ISA
