// How vectors of contiguous elements of a format are read and written; formats that have no vector form use lines.
#pragma once

#include "lanes.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {

#define CONVGRAD_INLINE static inline __attribute__((always_inline))

template <typename T> struct LaneTypes;
template <> struct LaneTypes<float> {
  typedef VecF V;
  typedef int32_t Index __attribute__((vector_size(CONVGRAD_VECTOR_BYTES)));
};
template <> struct LaneTypes<double> {
  typedef VecD V;
  typedef int64_t Index __attribute__((vector_size(CONVGRAD_VECTOR_BYTES)));
};
template <typename T> using Vec = typename LaneTypes<T>::V;
template <typename T> constexpr int lanes_of = CONVGRAD_VECTOR_BYTES / int(sizeof(T));

typedef uint32_t VecU __attribute__((vector_size(CONVGRAD_VECTOR_BYTES)));
typedef uint16_t VecH __attribute__((vector_size(CONVGRAD_VECTOR_BYTES / 2)));

// --- vectors of contiguous elements -------------------------------------------------------------------------------

// The formats with vector conversions of their own; all others go through the line functions of the instruction set.
struct AsF64 {
  using T = double;
  static constexpr int bytes = 8;
  CONVGRAD_INLINE VecD load(const char* p) { return convgrad::CONVGRAD_ISA::load<VecD>(p); }
  CONVGRAD_INLINE void store(char* p, VecD v) { convgrad::CONVGRAD_ISA::store(p, v); }
};
struct AsF32 {
  using T = float;
  static constexpr int bytes = 4;
  CONVGRAD_INLINE VecF load(const char* p) { return convgrad::CONVGRAD_ISA::load<VecF>(p); }
  CONVGRAD_INLINE void store(char* p, VecF v) { convgrad::CONVGRAD_ISA::store(p, v); }
};
struct AsBf16 {
  using T = float;
  static constexpr int bytes = 2;
  CONVGRAD_INLINE VecF load(const char* p) {
    VecU wide = __builtin_convertvector(convgrad::CONVGRAD_ISA::load<VecH>(p), VecU) << 16;
    return (VecF)wide;
  }
  CONVGRAD_INLINE void store(char* p, VecF v) {
#if defined(__AVX512BF16__)
    constexpr int subnormal = 0x20;  // the conversion would take such a value for zero
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, subnormal), 1)) {
      _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
      return;
    }
#endif
    VecU bits = (VecU)v;
    VecU even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    VecU quiet = (bits >> 16) | 0x40;
    convgrad::CONVGRAD_ISA::store(p, __builtin_convertvector(v == v ? even : quiet, VecH));
  }
};
#if defined(__F16C__)
struct AsF16 {
  using T = float;
  static constexpr int bytes = 2;
  static constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#if CONVGRAD_VECTOR_BYTES == 64
  static constexpr __mmask16 all = 0xffff;  // the unmasked forms draw false warnings from GCC 12
  CONVGRAD_INLINE VecF load(const char* p) {
    return (VecF)_mm512_maskz_cvtph_ps(all, _mm256_loadu_si256((const __m256i*)p));
  }
  CONVGRAD_INLINE void store(char* p, VecF v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(all, (__m512)v, nearest));
  }
#else
  CONVGRAD_INLINE VecF load(const char* p) { return (VecF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  CONVGRAD_INLINE void store(char* p, VecF v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, nearest));
  }
#endif
};
#endif
struct AsLines {  // no vector conversion: the line functions do the work
  using T = float;
  static constexpr int bytes = 0;
};
struct AsLines64 {
  using T = double;
  static constexpr int bytes = 0;
};

// The first n elements of a vector of `bytes` each, the others zero; memory beyond them is not touched.
template <typename E>
CONVGRAD_INLINE Vec<typename E::T> load_part(const char* p, int n) {
#if CONVGRAD_VECTOR_BYTES == 64
  const uint32_t first = (1u << n) - 1;
  if constexpr (E::bytes == 8) return (VecD)_mm512_maskz_loadu_pd(__mmask8(first), p);
  if constexpr (E::bytes == 4) return (VecF)_mm512_maskz_loadu_ps(__mmask16(first), p);
  if constexpr (E::bytes == 2) {
    alignas(32) char part[32];
    _mm256_store_si256((__m256i*)part, _mm256_maskz_loadu_epi16(__mmask16(first), p));
    return E::load(part);
  }
#endif
  alignas(64) char part[64] = {};
  memcpy(part, p, size_t(n * E::bytes));
  return E::load(part);
}

template <typename E, typename V>
CONVGRAD_INLINE void store_part(char* p, V v, int n) {
#if CONVGRAD_VECTOR_BYTES == 64
  const uint32_t first = (1u << n) - 1;
  if constexpr (E::bytes == 8) return _mm512_mask_storeu_pd(p, __mmask8(first), (__m512d)v);
  if constexpr (E::bytes == 4) return _mm512_mask_storeu_ps(p, __mmask16(first), (__m512)v);
  if constexpr (E::bytes == 2) {
    alignas(32) char part[32];
    E::store(part, v);
    return _mm256_mask_storeu_epi16(p, __mmask16(first), _mm256_load_si256((const __m256i*)part));
  }
#endif
  alignas(64) char part[64];
  E::store(part, v);
  memcpy(p, part, size_t(n * E::bytes));
}

// Stores one vector, around the caches if asked (AVX-512; `p` is then aligned, and its neighbours follow at once).
template <typename E, typename V>
CONVGRAD_INLINE void put(char* p, V v, bool stream) {
#if CONVGRAD_VECTOR_BYTES == 64
  if (E::bytes >= 4 && stream) {
    _mm512_stream_ps(reinterpret_cast<float*>(p), (__m512)v);
    return;
  }
  if (E::bytes == 2 && stream) {
    alignas(32) char half[32];
    E::store(half, v);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_load_si256(reinterpret_cast<const __m256i*>(half)));
    return;
  }
#endif
  (void)stream;
  E::store(p, v);
}

// --- what lands in a tensor -----------------------------------------------------------------------------------------

// The taps [low, high) of position j whose source lies in [0, size).
struct TapRange { int64_t low, high; };

static inline TapRange landing(const LanePhase& phase, int64_t j, int64_t size) {
  const int64_t at = phase.source + j * phase.source_step, step = phase.source_tap_step;
  int64_t low = 0, high = phase.taps;
  while (low < high && (at + low * step < 0 || at + low * step >= size)) ++low;
  while (low < high && (at + (high - 1) * step < 0 || at + (high - 1) * step >= size)) --high;
  return {low, high};
}

struct Range { int64_t low, high; };

// The outputs of [first, first+count) whose input for tap k lies in the tensor.
static inline Range landing(const Geometry& g, int axis, int64_t k, int64_t first, int64_t count) {
  const int64_t shift = k * g.dilation[axis] - g.pad[axis], stride = g.stride[axis];
  const int64_t low_at = shift < 0 ? (-shift + stride - 1) / stride : 0, room = g.in[axis] - 1 - shift;
  const int64_t high_at = room < 0 ? 0 : room / stride + 1;
  const int64_t low = low_at > first ? low_at : first;
  const int64_t high = high_at < first + count ? high_at : first + count;
  return {low, low < high ? high : low};
}

}  // namespace convgrad::CONVGRAD_ISA
#endif
