// How a unit of channels is read and written; see direct.h.
#pragma once

#include "direct.h"
#include "lane_elements.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {

// A unit of the correlations takes `rows` rows of taps at a time; where there is no second row (not Both), its pixels
// read as zero and its weights as well.
template <typename U>
struct SingleRow {
  static constexpr int rows = 1;
  template <bool Both>
  CONVGRAD_INLINE void load_rows(const char* p, int64_t, VecF* v) { U::load(p, v); }
  template <bool Both>
  CONVGRAD_INLINE VecF weight(const float* p) { return convgrad::CONVGRAD_ISA::load<VecF>(p); }
  CONVGRAD_INLINE void add(VecF& sum, VecF weight, VecF pixel) { sum += weight * pixel; }
};

struct UnitF32 : SingleRow<UnitF32> {
  static constexpr int vectors = 1, bytes = 4 * lanes_f;
  CONVGRAD_INLINE void load(const char* p, VecF* v) { v[0] = AsF32::load(p); }
  CONVGRAD_INLINE void store(char* p, const VecF* v, bool stream) { put<AsF32>(p, v[0], stream); }
};

// Two channels share a 32-bit word: a shift gives the even ones as floats, a mask the odd ones.
struct UnitBf16 : SingleRow<UnitBf16> {
  static constexpr int vectors = 2, bytes = 4 * lanes_f;
  CONVGRAD_INLINE void load(const char* p, VecF* v) {
    const VecU pairs = convgrad::CONVGRAD_ISA::load<VecU>(p);
    v[0] = (VecF)(pairs << 16);
    v[1] = (VecF)(pairs & 0xffff0000u);
  }
  CONVGRAD_INLINE VecU rounded(VecF v) {
    const VecU bits = (VecU)v;
    return v == v ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
  }
  CONVGRAD_INLINE void store(char* p, const VecF* v, bool stream) {
    put<AsF32>(p, (VecF)(rounded(v[0]) >> 16 | (rounded(v[1]) & 0xffff0000u)), stream);
  }
};

#if defined(__F16C__)
struct UnitF16 : SingleRow<UnitF16> {
  static constexpr int vectors = 2, bytes = 4 * lanes_f;
  CONVGRAD_INLINE void load(const char* p, VecF* v) {
    v[0] = AsF16::load(p);
    v[1] = AsF16::load(p + bytes / 2);
  }
  CONVGRAD_INLINE void store(char* p, const VecF* v, bool stream) {
#if CONVGRAD_VECTOR_BYTES == 64
    if (stream) {
      const __m256i low = _mm512_maskz_cvtps_ph(AsF16::all, (__m512)v[0], AsF16::nearest);
      const __m256i high = _mm512_maskz_cvtps_ph(AsF16::all, (__m512)v[1], AsF16::nearest);
      _mm512_stream_si512((__m512i*)p, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
      return;
    }
#endif
    (void)stream;
    AsF16::store(p, v[0]);
    AsF16::store(p + bytes / 2, v[1]);
  }
};
#endif

#if defined(__AVX512BF16__)
// Two rows of taps in one instruction: pixels of two rows lie side by side, channel by channel, as do their weights.
struct UnitPairs {
  static constexpr int vectors = 2, bytes = 64, rows = 2;
  template <bool Both>
  CONVGRAD_INLINE void load_rows(const char* p, int64_t row, VecF* v) {
    const __m512i a = _mm512_loadu_si512(p), b = Both ? _mm512_loadu_si512(p + row) : _mm512_setzero_si512();
    v[0] = (VecF)_mm512_unpacklo_epi16(a, b);
    v[1] = (VecF)_mm512_unpackhi_epi16(a, b);
  }
  template <bool Both>
  CONVGRAD_INLINE VecF weight(const float* p) {
    const __m512i pairs = _mm512_loadu_si512(p);
    return (VecF)(Both ? pairs : _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff)));
  }
  CONVGRAD_INLINE void add(VecF& sum, VecF weight, VecF pixel) {
    sum = (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)weight, (__m512bh)(__m512)pixel);
  }
  CONVGRAD_INLINE __m512i rounded(VecF v) {
    const VecU bits = (VecU)v;
    return (__m512i)((v == v ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000) >> 16);
  }
  CONVGRAD_INLINE void store(char* p, const VecF* v, bool stream) {
    // The conversion would take subnormal sums for zero.
    constexpr int subnormal = 0x20;
    __m512i r;
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v[0], subnormal) |
                         _mm512_fpclass_ps_mask((__m512)v[1], subnormal), 0)) {
      r = _mm512_packus_epi32(rounded(v[0]), rounded(v[1]));
    } else {
      const __m512i order = _mm512_set_epi64(0x001f001e001d001c, 0x000f000e000d000c, 0x001b001a00190018,
                                             0x000b000a00090008, 0x0017001600150014, 0x0007000600050004,
                                             0x0013001200110010, 0x0003000200010000);
      r = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]));
    }
    if (stream) _mm512_stream_si512((__m512i*)p, r);
    else _mm512_storeu_si512(p, r);
  }
};
#endif

}  // namespace convgrad::CONVGRAD_ISA
#endif
