// The bf16 micro-kernel on AVX512-BF16: vdpbf16ps multiplies pairs and sums in f32.
// NOTE: the instruction takes subnormal operands and results as zero; Inf and NaN come through.
#include <immintrin.h>

#include <cstring>

#include "gemm_tile.h"

namespace convgrad {
namespace {

// To the nearest bf16, ties to even, in the upper half of every word; of NaN the sign and a quiet NaN.
// NOTE: not vcvtneps2bf16, which takes subnormal sums as zero.
inline __m512i rounded(__m512 sum, bool& any_nan) {
  const __m512i u = _mm512_castps_si512(sum), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
  any_nan |= nan != 0;
  return _mm512_mask_or_epi32(near, nan, u, _mm512_set1_epi32(0x400000));
}

template <int rows, int vectors>
void tile(const GemmCall& call) {
  __m512 sum[rows][vectors], of_blocks[rows][vectors];
  float* c = reinterpret_cast<float*>(call.c);
  if (call.rounded && !(call.stream && vectors == 2))
    for (int m = 0; m < rows; ++m) {
      const char* row = call.rounded + m * call.rounded_stride;
      __builtin_prefetch(row, 1, 3);
      __builtin_prefetch(row + vectors * 32 - 1, 1, 3);
    }
  const auto each = [&](auto&& body) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) body(sum[m][v], of_blocks[m][v], c + m * call.ldc + v * 16);
  };
  each([](__m512& now, __m512&, float*) { now = _mm512_setzero_ps(); });
  const int64_t lda = call.lda, ldb = call.ldb;
  const int64_t pairs = call.k / 2;
  int64_t summed = 0, blocks = 0;  // pairs of the sums in registers, blocks of those beside them
  bool accumulate = call.accumulate;
  Fetcher fetcher(call, pairs);
  for (int64_t i = 0, done = 0; i < call.batch;) {  // see gemm_tile.cpp
    fetcher.some();
    const int64_t steps = pairs - done < fetcher.steps ? pairs - done : fetcher.steps;
    const int64_t coming = Fetcher::coming(done, pairs);
    if (2 * (summed + coming) > block_products) {
      if (blocks == most_blocks) {
        if (accumulate) each([](__m512&, __m512& before, float* to) { before += _mm512_loadu_ps(to); });
        each([](__m512&, __m512& before, float* to) { _mm512_storeu_ps(to, before); });
        accumulate = true;
        blocks = 0;
      }
      if (blocks) each([](__m512& now, __m512& before, float*) { before += now, now = _mm512_setzero_ps(); });
      else each([](__m512& now, __m512& before, float*) { before = now, now = _mm512_setzero_ps(); });
      ++blocks;
      summed = 0;
    }
    summed += coming;
    constexpr int pointers = (rows + 2) / 3;
    const char* a[pointers];
    for (int p = 0; p < pointers; ++p) a[p] = call.a + call.a_offset[i] + done * 4 + 3 * p * lda;
    const char* b = call.b + call.b_offset[i] + done * ldb;
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; ++k) {
      __m512bh bv[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        bv[v] = (__m512bh)_mm512_loadu_si512(b + v * 64);
        __builtin_prefetch(b + 12 * ldb + v * 64);
      }
#pragma GCC unroll 16
      for (int m = 0; m < rows; ++m) {
        int32_t pair;
        memcpy(&pair, a[m / 3] + (m % 3) * lda + k * 4, 4);
        __m512bh av = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], av, bv[v]);
      }
      b += ldb;
    }
    done += steps;
    if (done == pairs) ++i, done = 0;
  }
  if (blocks) each([](__m512& now, __m512& before, float*) { now += before; });
  if (accumulate) each([](__m512& now, __m512&, float* to) { now += _mm512_loadu_ps(to); });
  if (call.rounded) {
    alignas(64) static constexpr uint16_t upper_halves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                              23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                              45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const __m512i pick = _mm512_load_si512(upper_halves);
    bool nan = false;
#pragma GCC unroll 16
    for (int m = 0; m < rows; ++m) {
      char* row = call.rounded + m * call.rounded_stride;
      if constexpr (vectors == 2) {
        const __m512i low = rounded(sum[m][0], nan), high = rounded(sum[m][1], nan);
        const __m512i both = _mm512_permutex2var_epi16(low, pick, high);
        if (call.stream) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(row), both);
        } else {
          _mm512_storeu_si512(row, both);
        }
      } else {
        const __m512i low = rounded(sum[m][0], nan);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16)));
      }
    }
    if (nan) *call.nan = true;
    return;
  }
  each([](__m512& now, __m512&, float* to) { _mm512_storeu_ps(to, now); });
}

template <int vectors>
void run_tile(const GemmCall& call) {
  switch (call.rows) {
    case 1: return tile<1, vectors>(call);
    case 2: return tile<2, vectors>(call);
    case 3: return tile<3, vectors>(call);
    case 4: return tile<4, vectors>(call);
    case 5: return tile<5, vectors>(call);
    case 6: return tile<6, vectors>(call);
    case 7: return tile<7, vectors>(call);
    case 8: return tile<8, vectors>(call);
    case 9: return tile<9, vectors>(call);
    case 10: return tile<10, vectors>(call);
    case 11: return tile<11, vectors>(call);
    case 12: return tile<12, vectors>(call);
    case 13: return tile<13, vectors>(call);
    default: return tile<14, vectors>(call);
  }
}

}  // namespace

const Gemm gemm_bf16_avx512 = {"bf16_f32_14x32_avx512_bf16", 14, 32, 2, 2, 64, run_tile<2>, run_tile<1>,
                               nullptr, nullptr, 1, 0, 3, true};

}  // namespace convgrad
