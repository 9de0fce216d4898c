// Weight gradient of grouped convolutions where the tensors lie, channels last; see direct.h. AVX-512.
//
// The lanes are 16 input channels, of one group or of several. A word of dy, one output channel, is spread over the
// lanes of its group. bf16 take two pixels in one product: those of dy and of x are interleaved, channel by channel.
// The pixels of a group that fills the lanes are gathered first, see direct_gather.h.
#include <utility>

#include "direct_gather.h"
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

// Of gathered words, which hold two pixels already: all of a word, or its first pixel.
template <bool Both>
CONVGRAD_INLINE __m512i some(__m512i words) {
  return Both || pixels_at_once == 1 ? words : _mm512_and_si512(words, _mm512_set1_epi32(0xffff));
}

// sums[word][r][s] += sum over the pixels of dy[word] * x[r][s]. Gathered: words are read into all lanes.
template <bool Gathered, int R, int S>
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
  dy += Gathered ? v.chunk * Q * 4 : v.chunk / 4 * 16 * (P == 2 ? 2 : 4);
  const int64_t dy_pixel = v.dy_pixel, x_pixel = v.x_pixel, x_r = v.x_r, x_s = v.x_s;
  for (int64_t y = 0; y < v.rows; ++y, dy += v.dy_row, x += v.x_row) {
    if constexpr (Gathered) static_cast<Fetcher*>(v.fetcher)->fetch(4);
    const auto pixel = [&]<bool Both, bool Edge>(int64_t q) __attribute__((always_inline)) {
      const char *g = dy + q * dy_pixel, *p = x + q * x_pixel;
      __m512i words[Q];
      if constexpr (Gathered) {
        for (int i = 0; i < Q; ++i) words[i] = some<Both>(_mm512_set1_epi32(load<int32_t>(g + i * 4)));
      } else {
        const __m512i all = read<Both>(g, dy_pixel);
        for (int i = 0; i < Q; ++i) words[i] = _mm512_permutexvar_epi32(order[i], all);
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        if (Edge && uint64_t(v.first + q * v.step + s * v.tap_step) >= uint64_t(v.size)) continue;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const char* at = p + r * x_r + s * x_s;
          const __m512i inputs = Gathered ? some<Both>(_mm512_loadu_si512(at)) : read<Both>(at, x_pixel);
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

template <bool Gathered>
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
        {visit_tile<Gathered, 1, 1>, visit_tile<Gathered, 1, 2>, visit_tile<Gathered, 1, 3>},
        {visit_tile<Gathered, 2, 1>, visit_tile<Gathered, 2, 2>, visit_tile<Gathered, 2, 3>}};
    return table[r][s];
  }
  static void sum_rows(const DirectWeightGrad&, const Visit&, int64_t, float*) {}
};

// The part of a row of x that some pixel of dy reaches.
Range reached(const Geometry& g, int axis, int64_t first, int64_t count) {
  const int64_t low = first * g.stride[axis] - g.pad[axis];
  const int64_t high = low + (count - 1) * g.stride[axis] + (g.kernel[axis] - 1) * g.dilation[axis] + 1;
  return {low < 0 ? 0 : low, high > g.in[axis] ? g.in[axis] : high};
}

// Group by group on copies of its pixels.
void visit_gathered(const DirectWeightGrad& job) {
  const Geometry& g = *job.geo;
  const DirectUnits& units = job.units;
  // Pairs are copied in whole vectors.
  const int64_t bytes = size_of(units.dtype), from_words = units.group_from;
  const int64_t words = pixels_at_once == 1 ? from_words : (from_words + lanes_f - 1) / lanes_f * lanes_f;
  const Range in[3] = {reached(g, 0, job.z, 1), reached(g, 1, job.first, job.rows),
                       reached(g, 2, job.first_pixel, job.pixels)};
  for (const Range& r : in)
    if (r.low >= r.high) return;
  Gather dy{nullptr, job.dy_stride, {1, job.rows, job.pixels}, units.group_from * bytes};
  Gather x{nullptr, job.x_stride, {in[0].high - in[0].low, in[1].high - in[1].low, in[2].high - in[2].low},
           lanes_f * bytes};
  const int64_t dy_stride[5] = {0, 0, 0, job.pixels * words * 4, words * 4};
  const int64_t x_stride[5] = {0, 0, x.extent[1] * x.extent[2] * 64, x.extent[2] * 64, 64};
  char* const dy_copy = job.gathered;
  char* const x_copy = dy_copy + job.rows * dy_stride[axis_h];
  DirectWeightGrad part = job;
  part.dy_stride = dy_stride;
  part.x_stride = x_stride;
  part.unit_count = 1;
  int64_t group = -1;
  for (int64_t u = job.first_unit; u < job.first_unit + job.unit_count; ++u) {
    const bool last = u + 1 == job.first_unit + job.unit_count;
    const int64_t to = units.first(u), from = units.source(u);
    part.first_unit = u;
    if (group != to / units.group_to) {
      group = to / units.group_to;
      dy.from = job.dy + from * bytes + job.z * job.dy_stride[axis_d] + job.first * job.dy_stride[axis_h] +
                job.first_pixel * job.dy_stride[axis_w];
#if defined(__AVX512BF16__)
      gather_pairs(dy, 1, g.out[2] - job.first_pixel, dy_copy);
#else
      gather_bytes(dy, dy_copy);
#endif
      part.dy = dy_copy - from * bytes - job.first * dy_stride[axis_h] - job.first_pixel * dy_stride[axis_w];
    }
    x.from = job.x + to * bytes + in[0].low * job.x_stride[axis_d] + in[1].low * job.x_stride[axis_h] +
             in[2].low * job.x_stride[axis_w];
#if defined(__AVX512BF16__)
    gather_pairs(x, g.stride[2], g.in[2] - in[2].low, x_copy);
#else
    gather_bytes(x, x_copy);
#endif
    part.x = x_copy - to * bytes - in[0].low * x_stride[axis_d] - in[1].low * x_stride[axis_h] -
             in[2].low * x_stride[axis_w];
    Fetcher fetcher;
    const int64_t next = last ? job.first_unit : u + 1;
    fetcher.add(x, (units.first(next) - to) * bytes + (last ? job.x_ahead : 0));
    if (last || units.source(next) != from)
      fetcher.add(dy, (units.source(next) - from) * bytes + (last ? job.dy_ahead : 0));
    part.fetcher = &fetcher;
    WeightJob<GroupTiles<true>>(part).run();
  }
}

}  // namespace

void weight_grad_groups(const DirectWeightGrad& job) {
  if (job.units.group_to >= job.units.lanes) return visit_gathered(job);
  WeightJob<GroupTiles<false>>(job).run();
}

}  // namespace convgrad::CONVGRAD_ISA
