// Weight gradient of grouped convolutions where the tensors lie, channels last; see direct.h. AVX-512.
//
// The lanes are 16 input channels, of one group or of several. A word of dy, one output channel, is spread over the
// lanes of its group. bf16 take two pixels in one product: those of dy and of x are interleaved, channel by channel.
#include <utility>

#include "direct_visits.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

constexpr int tap_rows[] = {1, 2}, tap_columns[] = {1, 2, 3}, tile_words = 4;

#if defined(__AVX512BF16__)
constexpr int pixels_at_once = 2;
// The channels of one or two pixels, `second` bytes apart.
template <bool Both>
CONVGRAD_INLINE __m512i read(const char* p, int64_t second) {
  if constexpr (!Both) return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)), order,
                                   _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(p + second))));
}
CONVGRAD_INLINE __m512 add(__m512 sum, __m512i dy, __m512i x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)dy, (__m512bh)x);
}
#else
constexpr int pixels_at_once = 1;
template <bool Both>
CONVGRAD_INLINE __m512i read(const char* p, int64_t) {
  return _mm512_loadu_si512(p);
}
CONVGRAD_INLINE __m512 add(__m512 sum, __m512i dy, __m512i x) { return _mm512_fmadd_ps((__m512)dy, (__m512)x, sum); }
#endif

// sums[word][r][s] += sum over the pixels of dy[word] * x[r][s]. Broadcast: f32 words are read into all lanes.
template <bool Broadcast, int R, int S>
void visit_tile(Visit& v, const char* dy, const char* x, float* sums) {
  constexpr int Q = tile_words, P = pixels_at_once;
  __m512 sum[R][S][Q];
  for (int r = 0; r < R; ++r)
    for (int s = 0; s < S; ++s)
      for (int i = 0; i < Q; ++i) sum[r][s][i] = _mm512_setzero_ps();
  __m512i order[Q];
  for (int i = 0; i < Q; ++i)
    order[i] = _mm512_add_epi32(_mm512_loadu_si512(v.first_word), _mm512_set1_epi32(int(v.chunk % 4) * Q + i));
  // Chunks of one group: the 16 channels of dy that hold the words.
  dy += Broadcast ? v.chunk * Q * 4 : v.chunk / 4 * 16 * (P == 2 ? 2 : 4);
  const int64_t dy_pixel = v.dy_pixel, x_pixel = v.x_pixel, x_r = v.x_r, x_s = v.x_s;
  for (int64_t y = 0; y < v.rows; ++y, dy += v.dy_row, x += v.x_row) {
    const auto pixel = [&]<bool Both, bool Edge>(int64_t q) __attribute__((always_inline)) {
      const char *g = dy + q * dy_pixel, *p = x + q * x_pixel;
      __m512i words[Q];
      if constexpr (Broadcast) {
        for (int i = 0; i < Q; ++i) words[i] = _mm512_set1_epi32(load<int32_t>(g + i * 4));
      } else {
        const __m512i all = read<Both>(g, dy_pixel);
        for (int i = 0; i < Q; ++i) words[i] = _mm512_permutexvar_epi32(order[i], all);
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        if (Edge && uint64_t(v.first + q * v.step + s * v.tap_step) >= uint64_t(v.size)) continue;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512i inputs = read<Both>(p + r * x_r + s * x_s, x_pixel);
#pragma GCC unroll 4
          for (int i = 0; i < Q; ++i) sum[r][s][i] = add(sum[r][s][i], words[i], inputs);
        }
      }
    };
    int64_t q = 0;
    for (; q < v.inner_low; ++q) pixel.template operator()<false, true>(q);
    for (; q + P <= v.inner_high; q += P) pixel.template operator()<P == 2, false>(q);
    for (; q < v.pixels; ++q) pixel.template operator()<false, true>(q);
  }
  for (int i = 0; i < Q; ++i)
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < S; ++s) {
        float* to = sums + i * v.sum_word + r * v.sum_r + s * v.sum_s;
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum[r][s][i]));
      }
}

template <bool Broadcast>
struct GroupTiles {
  static constexpr const auto& rows = tap_rows;
  static constexpr const auto& columns = tap_columns;
  static constexpr int most_taps = 6, words = tile_words;
  static constexpr bool asks_rows = false;
  static int64_t chunks(const DirectUnits& units) { return units.group_from / tile_words; }
  static void prepare(const DirectUnits& units, Visit& v) {
    const bool shared = units.group_to < units.lanes;
    for (int64_t lane = 0; lane < 16; ++lane)
      v.first_word[lane] = shared ? int32_t(lane / units.group_to * units.group_to) : 0;
  }
  static Tile tile(bool, int r, int s) {
    static constexpr Tile table[2][3] = {
        {visit_tile<Broadcast, 1, 1>, visit_tile<Broadcast, 1, 2>, visit_tile<Broadcast, 1, 3>},
        {visit_tile<Broadcast, 2, 1>, visit_tile<Broadcast, 2, 2>, visit_tile<Broadcast, 2, 3>}};
    return table[r][s];
  }
  static void sum_rows(const DirectWeightGrad&, const Visit&, int64_t, float*) {}
};

}  // namespace

void weight_grad_groups(const DirectWeightGrad& job) {
#if !defined(__AVX512BF16__)
  if (job.units.group_to >= job.units.lanes) return WeightJob<GroupTiles<true>>(job).run();
#endif
  WeightJob<GroupTiles<false>>(job).run();
}

}  // namespace convgrad::CONVGRAD_ISA
