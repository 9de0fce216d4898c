// How a unit of channels is read and written; see direct.h.
#pragma once

#include "direct.h"
#include "lane_elements.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {

struct UnitF32 {
  static constexpr int vectors = 1, bytes = 4 * lanes_f;
  CONVGRAD_INLINE void load(const char* p, VecF* v) { v[0] = AsF32::load(p); }
  CONVGRAD_INLINE void store(char* p, const VecF* v, bool stream) { put<AsF32>(p, v[0], stream); }
};

// Two channels share a 32-bit word: a shift gives the even ones as floats, a mask the odd ones.
struct UnitBf16 {
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
struct UnitF16 {
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

}  // namespace convgrad::CONVGRAD_ISA
#endif
