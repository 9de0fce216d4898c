// The AVX512-BF16 instructions in software, for tests on processors that have AVX-512 without them: with
// -DCONVGRAD_EMULATE_BF16=ON the files of that level are compiled with this header in front, and
// CONVGRAD_ISA=avx512_bf16 runs them. Slow, but the same numbers: of a pair the odd product is added first, subnormal
// operands and results count as zero, whatever the rounding and exception flags say.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace convgrad::bf16_emulated {
namespace {

inline __m512 flushed(__m512 v) {
  constexpr int subnormal = 0x20;
  const __m512 sign = _mm512_and_ps(v, _mm512_castsi512_ps(_mm512_set1_epi32(int(0x80000000u))));
  return _mm512_mask_mov_ps(v, _mm512_fpclass_ps_mask(v, subnormal), sign);
}
inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u));
  const auto odd = [&](__m512i v) { return flushed(_mm512_castsi512_ps(_mm512_and_si512(v, upper))); };
  const auto even = [&](__m512i v) { return flushed(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))); };
  const __m512 first = flushed(_mm512_fmadd_ps(odd(a), odd(b), flushed(sum)));
  return flushed(_mm512_fmadd_ps(even(a), even(b), first));
}
// To the nearest bf16, ties to even, in the lower half of every word.
inline __m512i round(__m512 value) {
  const __m512 v = flushed(value);
  const __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_or_epi32(near, nan, u, _mm512_set1_epi32(0x400000)), 16);
}
inline __m256i convert(__m512 v) { return _mm512_cvtepi32_epi16(round(v)); }
inline __m512i convert_two(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(convert(low)), convert(high), 1);
}

}  // namespace
}  // namespace convgrad::bf16_emulated

#define CONVGRAD_EMULATED_BF16 1
#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps(sum, a, b) ::convgrad::bf16_emulated::dot(sum, (__m512i)(a), (__m512i)(b))
#define _mm512_cvtneps_pbh(v) ::convgrad::bf16_emulated::convert(v)
#define _mm512_cvtne2ps_pbh(high, low) ::convgrad::bf16_emulated::convert_two(high, low)
