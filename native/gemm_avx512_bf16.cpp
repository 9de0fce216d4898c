// The bf16 micro-kernel on AVX512-BF16: vdpbf16ps multiplies pairs and sums in f32.
// NOTE: the instruction takes subnormal operands and results as zero; Inf and NaN come through.
#include <immintrin.h>

#include <cstring>

#include "gemm_tile.h"

namespace convgrad {
namespace {

template <int rows, int vectors>
void tile(const GemmCall& call) {
  __m512 sum[rows][vectors];
  float* c = reinterpret_cast<float*>(call.c);
#pragma GCC unroll 16
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v)
      sum[m][v] = call.accumulate ? _mm512_loadu_ps(c + m * call.ldc + v * 16) : _mm512_setzero_ps();
  const int64_t lda = call.lda, ldb = call.ldb;
  const int64_t pairs = call.k / 2;
  Fetcher fetcher(call, pairs);
  for (int64_t i = 0, done = 0; i < call.batch;) {  // see gemm_tile.cpp
    fetcher.some();
    const int64_t steps = pairs - done < fetcher.steps ? pairs - done : fetcher.steps;
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
#pragma GCC unroll 16
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) _mm512_storeu_ps(c + m * call.ldc + v * 16, sum[m][v]);
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
                               nullptr, nullptr, 1, 0, 3};

}  // namespace convgrad
