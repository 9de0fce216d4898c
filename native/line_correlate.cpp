// Depthwise convolutions along a line of pixels: output, input gradient, weight gradient; see line.h.
#include <utility>

#include "blocked_sums.h"
#include "lane_elements.h"
#include "line.h"

namespace convgrad::CONVGRAD_ISA {
namespace {

constexpr int L = lanes_f;

// Vectors of results leave one after the other, the last one in part.
template <typename E>
CONVGRAD_INLINE void put_pixels(char* to, VecF v, int64_t left, bool stream) {
  if (left < L) {
    store_part<E>(to, v, int(left));
    return;
  }
  put<E>(to, v, stream);
}

// Tap after tap for X vectors of pixels.
template <typename E, int X, bool Blocked>
CONVGRAD_INLINE void short_tile(const LineCorrelation& job, const float* from, const float* w, char* to, int64_t left,
                                bool stream) {
  VecF sum[X] = {};
  const float* f = from + (job.backwards ? (job.taps - 1) * job.step : 0);
  const int64_t step = job.backwards ? -job.step : job.step, w_step = job.backwards ? -1 : 1;
  const float* tap = w + (job.backwards ? job.taps - 1 : 0);
  BlockedSums<VecF, X> blocks;
  for (int64_t s = 0; s < job.taps; ++s, f += step, tap += w_step) {
    if constexpr (Blocked) blocks.expect(sum, 1);
    const VecF weight = splat<VecF>(*tap);
    for (int x = 0; x < X; ++x) sum[x] += weight * load<VecF>(f + x * L);
  }
  if constexpr (Blocked) blocks.finish(sum);
  for (int x = 0; x < X; ++x)
    if (left > x * L) put_pixels<E>(to + x * L * E::bytes, sum[x], left - x * L, stream);
}

template <typename E, bool Blocked>
void short_line(const LineCorrelation& job, const float* from, const float* w, char* to, bool stream) {
  int64_t x = 0;
  for (; x + 8 * L <= job.to_size; x += 8 * L)
    short_tile<E, 8, Blocked>(job, from + x, w, to + x * E::bytes, job.to_size - x, stream);
  for (; x < job.to_size; x += 2 * L)
    short_tile<E, 2, Blocked>(job, from + x, w, to + x * E::bytes, job.to_size - x, stream);
}

#if CONVGRAD_VECTOR_BYTES == 64
// Many taps. Taps that are a vector apart read the same shift of the line, so sums are shifted instead of pixels:
// of tap = L*a + b, first the sum over a on whole vectors, then its shift by b. Every pixel is read at its own place.
constexpr int64_t most_long = 2 * L;

// NOTE: the taps that are missing to most_long are zero, and times Inf they would be NaN: false where a result is NaN,
// for which tap after tap must tell.
#if defined(__AVX512BF16__)
// Two neighbouring taps meet two neighbouring pixels in one product: 16 taps of pairs, at every second shift.
constexpr int shifts = L / 2, apart = 2;
CONVGRAD_INLINE __m512 products(__m512 w0, __m512 x0, __m512 w1, __m512 x1) {
  const __m512 first = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)w0, (__m512bh)x0);
  return _mm512_dpbf16_ps(first, (__m512bh)w1, (__m512bh)x1);
}
// Of n numbers that are exact in bf16 each with the one that follows it, in one word.
CONVGRAD_INLINE void pair_up(const float* from, int64_t n, float* pairs) {
  for (int64_t i = 0; i < n; i += L) {
    const __m512i first = _mm512_srli_epi32(_mm512_loadu_si512(from + i), 16);
    const __m512i second = _mm512_and_si512(_mm512_loadu_si512(from + i + 1), _mm512_set1_epi32(int(0xffff0000)));
    _mm512_storeu_si512(pairs + i, _mm512_or_si512(first, second));
  }
}
#else
constexpr int shifts = L, apart = 1;
CONVGRAD_INLINE __m512 products(__m512 w0, __m512 x0, __m512 w1, __m512 x1) {
  return _mm512_fmadd_ps(w1, x1, _mm512_mul_ps(w0, x0));
}
#endif

template <typename E, int... B>
CONVGRAD_INLINE bool long_line_shifts(const LineCorrelation& job, const float* from, const float* w, char* to,
                                      bool stream, std::integer_sequence<int, B...>) {
  __m512 before[shifts], x0 = _mm512_loadu_ps(from), x1 = _mm512_loadu_ps(from + L);
  __mmask16 nan = 0;
  ((before[B] = products(_mm512_set1_ps(w[B]), x0, _mm512_set1_ps(w[shifts + B]), x1)), ...);
  for (int64_t at = 0; at < job.to_size; at += L) {
    x0 = x1;
    x1 = _mm512_loadu_ps(from + at + 2 * L);
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    const auto shift = [&]<int b>() __attribute__((always_inline)) {
      const __m512 now = products(_mm512_set1_ps(w[b]), x0, _mm512_set1_ps(w[shifts + b]), x1);
      const __m512 shifted = (__m512)_mm512_alignr_epi32((__m512i)now, (__m512i)before[b], b * apart);
      sum[b % 2] = _mm512_add_ps(sum[b % 2], shifted);
      before[b] = now;
    };
    (shift.template operator()<B>(), ...);
    const __m512 result = _mm512_add_ps(sum[0], sum[1]);
    nan |= _mm512_cmp_ps_mask(result, result, _CMP_UNORD_Q);
    put_pixels<E>(to + at * E::bytes, (VecF)result, job.to_size - at, stream);
  }
  return !nan;
}

template <typename E>
bool long_line(const LineCorrelation& job, const float* from, const float* w, char* to, bool stream) {
  const int first = job.taps < L ? int(job.taps) : L;
  const VecF low = load_part<AsF32>((const char*)w, first);
  const VecF high = load_part<AsF32>((const char*)(w + first), int(job.taps) - first);
#if defined(__AVX512BF16__)
  alignas(64) float taps[L];
  _mm512_store_si512(taps, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
  float* const line = job.scratch + job.scratch_floats();
  pair_up(from, job.to_size + 3 * L, line);
  from = line;
#else
  alignas(64) float taps[2 * L];
  store(taps, low);
  store(taps + L, high);
#endif
  return long_line_shifts<E>(job, from, taps, to, stream, std::make_integer_sequence<int, shifts>());
}
#endif

template <typename E>
void correlate(const LineCorrelation& job) {
  // The line in floats, zeros beside it.
  float* line = job.scratch;
  const int64_t room = job.scratch_floats(), left = job.pad < 0 ? 0 : job.pad < room ? job.pad : room;
  const int64_t skip = job.pad < 0 ? -job.pad : 0, bytes = size_of(job.operand.dtype);
  int64_t inside = job.from_size - skip < room - left ? job.from_size - skip : room - left;
  if (inside < 0) inside = 0;
  for (int64_t i = 0; i < left; ++i) line[i] = 0;
  for (int64_t i = left + inside; i < room; ++i) line[i] = 0;
  for (int64_t i = 0; i < job.lines; ++i) {
    job.operand.decode(job.from + i * job.from_line + skip * bytes, bytes, inside, line + left);
    if (job.operand.round) job.operand.round(line + left, inside);
    const float* w = job.weights + i * job.taps;
    char* to = job.to + i * job.to_line;
    const bool stream = job.stream && reinterpret_cast<uintptr_t>(to) % 64 == 0;
#if CONVGRAD_VECTOR_BYTES == 64
    const bool many = job.step == 1 && job.taps >= fewest_long_taps && job.taps <= most_long;
    if (many && long_line<E>(job, line, w, to, stream)) continue;
#endif
    if (job.taps > longest_whole) short_line<E, true>(job, line, w, to, stream);
    else short_line<E, false>(job, line, w, to, stream);
  }
#if CONVGRAD_VECTOR_BYTES == 64
  if (job.stream) _mm_sfence();
#endif
}

CONVGRAD_INLINE float across(VecF v) {
  float sum = 0;
  for (int l = 0; l < L; ++l) sum += v[l];
  return sum;
}

// Longer lines are summed by halves: no term passes through many roundings.
constexpr int64_t longest_line = 128 * 4 * L;

[[maybe_unused]] float dot(const float* a, const float* b, int64_t n) {
  if (n > longest_line) return dot(a, b, n / 2) + dot(a + n / 2, b + n / 2, n - n / 2);
  VecF sum[8] = {};
  int64_t i = 0;
  for (; i + 8 * L <= n; i += 8 * L)
    for (int j = 0; j < 8; ++j) sum[j] += load<VecF>(a + i + j * L) * load<VecF>(b + i + j * L);
  for (; i + L <= n; i += L) sum[0] += load<VecF>(a + i) * load<VecF>(b + i);
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * b[i];
  return across(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]))) + rest;
}

float total(const float* a, int64_t n) {
  if (n > longest_line) return total(a, n / 2) + total(a + n / 2, n - n / 2);
  VecF sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L)
    for (int j = 0; j < 4; ++j) sum[j] += load<VecF>(a + i + j * L);
  float rest = 0;
  for (; i < n; ++i) rest += a[i];
  return across((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

#if defined(__AVX512BF16__)
// Of bf16 as they are stored: two pixels of both lines in one product.
float dot_pairs(const char* a, const char* b, int64_t n) {
  if (n > longest_line) return dot_pairs(a, b, n / 2) + dot_pairs(a + n / 2 * 2, b + n / 2 * 2, n - n / 2);
  __m512 sum[4] = {};
  int64_t i = 0;
  const auto add = [&](int j, __m512i x, __m512i y) __attribute__((always_inline)) {
    sum[j] = _mm512_dpbf16_ps(sum[j], (__m512bh)x, (__m512bh)y);
  };
  for (; i + 128 <= n; i += 128)
    for (int j = 0; j < 4; ++j)
      add(j, _mm512_loadu_si512(a + 2 * i + 64 * j), _mm512_loadu_si512(b + 2 * i + 64 * j));
  for (; i < n; i += 32) {
    const __mmask32 mask = n - i >= 32 ? ~__mmask32(0) : (__mmask32(1) << (n - i)) - 1;
    add(0, _mm512_maskz_loadu_epi16(mask, a + 2 * i), _mm512_maskz_loadu_epi16(mask, b + 2 * i));
  }
  return across((VecF)((sum[0] + sum[1]) + (sum[2] + sum[3])));
}
#endif

// A line as floats: where it lies if it holds floats that may be read there, else decoded.
[[maybe_unused]] const float* floats(const ElementCode& code, const char* line, int64_t n, float* scratch) {
  if (code.dtype == Dtype::f32 && !code.round && reinterpret_cast<uintptr_t>(line) % 4 == 0)
    return reinterpret_cast<const float*>(line);
  code.decode(line, size_of(code.dtype), n, scratch);
  return scratch;
}

}  // namespace

void weight_grad_lines(const LineWeightGrad& job) {
  float* sums = job.sums;
  const auto visit = [&](const auto& product, const auto* dy, const auto* x, int64_t element) {
    for (int64_t s = 0; s < job.taps; ++s, ++sums) {
      const int64_t shift = s * job.step - job.pad, low = shift < 0 ? -shift : 0;
      const int64_t high = job.x_size - shift < job.dy_size ? job.x_size - shift : job.dy_size;
      if (low < high) *sums += product(dy + low * element, x + (low + shift) * element, high - low);
    }
  };
  for (int64_t i = 0; i < job.lines; ++i) {
#if defined(__AVX512BF16__)
    visit(dot_pairs, job.dy + i * job.dy_line, job.x + i * job.x_line, 2);
    if (job.bias) {
      job.operand.decode(job.dy + i * job.dy_line, 2, job.dy_size, job.scratch);
      *sums++ += total(job.scratch, job.dy_size);
    }
#else
    const float* x = floats(job.operand, job.x + i * job.x_line, job.x_size, job.scratch);
    const float* dy = floats(job.operand, job.dy + i * job.dy_line, job.dy_size, job.scratch + job.x_size);
    const float bias = job.bias ? total(dy, job.dy_size) : 0;
    if (job.operand.round) {
      job.operand.round(job.scratch, job.x_size);
      job.operand.round(job.scratch + job.x_size, job.dy_size);
    }
    visit(dot, dy, x, 1);
    if (job.bias) *sums++ += bias;
#endif
  }
}

void correlate_lines(const LineCorrelation& job) {
  switch (job.result.dtype) {
    case Dtype::bf16: return correlate<AsBf16>(job);
#if defined(__F16C__)
    case Dtype::f16: return correlate<AsF16>(job);
#endif
    default: return correlate<AsF32>(job);
  }
}

}  // namespace convgrad::CONVGRAD_ISA
