// Conversions of lines of elements between the stored number formats and float; compiled once per level.
#include "lines.h"

#include "simd.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace convgrad::CONVGRAD_ISA {
namespace {

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <typename T>
inline T fetch(const char* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

// ---- one element: stored bits to float ----

struct F32 {
  using Bits = uint32_t;
  static inline float decode(Bits b) { return bits_as<float>(b); }
  static inline Bits encode(float f) { return bits_as<Bits>(f); }
};

struct Bf16 {
  using Bits = uint16_t;
  static inline float decode(Bits b) { return bits_as<float>(uint32_t(b) << 16); }
  static inline Bits encode(float f) {
    uint32_t u = bits_as<uint32_t>(f);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    return Bits((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
};

struct F16 {
  using Bits = uint16_t;
  static inline float decode(Bits b) {
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and makes subnormals normal.
    float magnitude = bits_as<float>(uint32_t(b & 0x7fffu) << 13) * bits_as<float>(0x77800000u);
    uint32_t u = bits_as<uint32_t>(magnitude);
    u |= (b & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return bits_as<float>(u | uint32_t(b & 0x8000u) << 16);
  }
  static inline Bits encode(float f) {
    uint32_t u = bits_as<uint32_t>(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    // Subnormal results: adding 1/2 ulp-aligned constant lets the FPU round to a multiple of 2^-24.
    uint32_t tiny = bits_as<uint32_t>(bits_as<float>(u < 0x38800000u ? u : 0u) + 0.5f) - 0x3f000000u;
    uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1)) >> 13;
    uint32_t r = u < 0x38800000u ? tiny : normal;
    r = u >= 0x477ff000u ? 0x7c00u : r;              // rounds to 65536 or more
    r = u > 0x7f800000u ? 0x7e00u | ((u >> 13) & 0x3ffu) : r;
    return Bits(r | sign);
  }
};

// e4m3fn and e5m2: nearest even; e4m3 has no Inf, what overflows becomes NaN; e5m2 overflows to Inf.
template <int mantissa, int bias, uint32_t largest, uint32_t overflow, uint32_t nan>
struct Float8 {
  using Bits = uint8_t;
  static inline float decode(Bits b) {
    uint32_t code = b & 0x7fu;
    float magnitude = bits_as<float>(code << (23 - mantissa)) * bits_as<float>(uint32_t(254 - bias) << 23);
    uint32_t u = bits_as<uint32_t>(magnitude);
    if (overflow == nan) {
      u = code == nan ? 0x7fc00000u : u;
    } else {
      u = code == overflow ? 0x7f800000u : code > overflow ? 0x7fc00000u : u;
    }
    return bits_as<float>(u | uint32_t(b & 0x80u) << 24);
  }
  static inline Bits encode(float f) {
    constexpr uint32_t smallest_normal = uint32_t(128 - bias) << 23, drop = 23 - mantissa;
    // Adding 2^(23 - units) lets the FPU round a subnormal to a multiple of 2^(1 - bias - mantissa).
    constexpr uint32_t anchor = uint32_t(127 + 23 + 1 - bias - mantissa) << 23;
    uint32_t u = bits_as<uint32_t>(f), sign = (u >> 24) & 0x80u;
    u &= 0x7fffffffu;
    uint32_t tiny =
        bits_as<uint32_t>(bits_as<float>(u < smallest_normal ? u : 0u) + bits_as<float>(anchor)) - anchor;
    uint32_t normal = ((u + (1u << (drop - 1)) - 1 + ((u >> drop) & 1)) >> drop) - (uint32_t(127 - bias) << mantissa);
    uint32_t r = u < smallest_normal ? tiny : normal;
    r = u >= 0x7f800000u || r > largest ? overflow : r;
    r = u > 0x7f800000u ? nan : r;
    return Bits(r | sign);
  }
};
using E4m3 = Float8<3, 7, 0x7e, 0x7f, 0x7f>;
using E5m2 = Float8<2, 15, 0x7b, 0x7c, 0x7e>;

// HiFloat8: a prefix code ("dot") gives the width of the exponent; ties go away from zero; one zero, one NaN.
struct Hif8 {
  using Bits = uint8_t;
  static inline float decode(Bits b) { return hif8_values[b]; }
  static inline Bits encode(float f) {
    uint32_t u = bits_as<uint32_t>(f), sign = (u >> 24) & 0x80u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return 0x80;
    if (u < 0x34000000u) return 0;             // below 2^-23
    if (u >= 0x47200000u) return Bits(0x6f | sign);  // 1.25 * 2^15 and more
    int exponent = int(u >> 23) - 127, size = exponent < 0 ? -exponent : exponent;
    int kept = exponent < -15 ? 0 : size < 4 ? 3 : size < 8 ? 2 : 1;
    u = (u + (1u << (22 - kept))) >> (23 - kept) << (23 - kept);
    exponent = int(u >> 23) - 127;
    if (exponent < -22) exponent = -22;
    size = exponent < 0 ? -exponent : exponent;
    if (exponent < -15) return Bits(sign | uint32_t(exponent + 23));
    uint32_t fraction = u & 0x7fffffu, negative = exponent < 0;
    if (size == 0) return Bits(sign | 0x08u | fraction >> 20);
    if (size == 1) return Bits(sign | 0x10u | negative << 3 | fraction >> 20);
    if (size < 4) return Bits(sign | 0x20u | negative << 4 | uint32_t(size - 2) << 3 | fraction >> 20);
    if (size < 8) return Bits(sign | 0x40u | negative << 4 | uint32_t(size - 4) << 2 | fraction >> 21);
    return Bits(sign | 0x60u | negative << 4 | uint32_t(size - 8) << 1 | fraction >> 22);
  }
};

// ---- lines ----

template <typename Format>
void decode_line(const char* src, int64_t stride, int64_t n, float* dst) {
  using Bits = typename Format::Bits;
  if (stride == int64_t(sizeof(Bits))) {
    for (int64_t i = 0; i < n; ++i) dst[i] = Format::decode(fetch<Bits>(src + i * sizeof(Bits)));
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = Format::decode(fetch<Bits>(src + i * stride));
  }
}

template <typename Format>
void encode_line(const float* src, int64_t n, char* dst, int64_t stride) {
  using Bits = typename Format::Bits;
  if (stride == int64_t(sizeof(Bits))) {
    for (int64_t i = 0; i < n; ++i) {
      Bits bits = Format::encode(src[i]);
      memcpy(dst + i * sizeof(Bits), &bits, sizeof bits);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      Bits bits = Format::encode(src[i]);
      memcpy(dst + i * stride, &bits, sizeof bits);
    }
  }
}

#if defined(__F16C__)
void decode_line_f16(const char* src, int64_t stride, int64_t n, float* dst) {
  int64_t i = 0;
  if (stride == 2) {
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(src + 2 * i))));
#endif
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(src + 2 * i))));
  }
  for (; i < n; ++i) dst[i] = _cvtsh_ss(fetch<uint16_t>(src + i * stride));
}

void encode_line_f16(const float* src, int64_t n, char* dst, int64_t stride) {
  int64_t i = 0;
  if (stride == 2) {
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128((__m128i*)(dst + 2 * i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  for (; i < n; ++i) {
    uint16_t bits = _cvtss_sh(src[i], _MM_FROUND_TO_NEAREST_INT);
    memcpy(dst + i * stride, &bits, sizeof bits);
  }
}
#else
constexpr DecodeLine decode_line_f16 = decode_line<F16>;
constexpr EncodeLine encode_line_f16 = encode_line<F16>;
#endif

void encode_line_f64(const float* src, int64_t n, char* dst, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) {
    double value = src[i];
    memcpy(dst + i * stride, &value, sizeof value);
  }
}

// ---- blocks ----

constexpr int64_t lines_ahead = 6;  // how far the prefetches run in front of the conversion

inline void prefetch_line(const char* src, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(src + at);
}

#if defined(__AVX512F__)
inline __m512 load_vector(F32, const char* src, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, src); }
inline __m512 load_vector(Bf16, const char* src, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, src)), 16));
}
inline __m512 load_vector(F16, const char* src, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, src));
}

template <typename Format>
inline void decode_dense(const char* src, int64_t n, float* dst) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(dst + i, load_vector(Format{}, src + i * sizeof(typename Format::Bits), 0xffff));
  if (i < n) {
    const __mmask16 mask = __mmask16((1u << (n - i)) - 1);
    _mm512_mask_storeu_ps(dst + i, mask, load_vector(Format{}, src + i * sizeof(typename Format::Bits), mask));
  }
}
#else
template <typename Format>
inline void decode_dense(const char* src, int64_t n, float* dst) {
  decode_line<Format>(src, sizeof(typename Format::Bits), n, dst);
}
#if defined(__F16C__)
template <>
inline void decode_dense<F16>(const char* src, int64_t n, float* dst) {
  decode_line_f16(src, 2, n, dst);
}
#endif
#endif
#define CONVGRAD_LINEWISE(Format)                                             \
  template <>                                                                 \
  inline void decode_dense<Format>(const char* src, int64_t n, float* dst) {  \
    decode_line<Format>(src, 1, n, dst);                                      \
  }
CONVGRAD_LINEWISE(E4m3)
CONVGRAD_LINEWISE(E5m2)
CONVGRAD_LINEWISE(Hif8)

template <typename Format>
void decode_block(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, float* dst,
                  int64_t pitch) {
  constexpr int64_t size = sizeof(typename Format::Bits);
  for (int64_t line = 0; line < lines; ++line, src += line_stride, dst += pitch) {
    if (stride == size) {
      if (line + lines_ahead < lines) prefetch_line(src + lines_ahead * line_stride, n * size);
      decode_dense<Format>(src, n, dst);
    } else {
      for (int64_t i = 0; i < n; ++i) dst[i] = Format::decode(fetch<typename Format::Bits>(src + i * stride));
    }
  }
}

void copy16_block(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, uint16_t* dst,
                  int64_t pitch) {
  for (int64_t line = 0; line < lines; ++line, src += line_stride, dst += pitch) {
    if (stride != 2) {
      for (int64_t i = 0; i < n; ++i) dst[i] = fetch<uint16_t>(src + i * stride);
      continue;
    }
    if (line + lines_ahead < lines) prefetch_line(src + lines_ahead * line_stride, n * 2);
#if defined(__AVX512F__)
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(dst + i, _mm512_loadu_si512(src + 2 * i));
    if (i < n) {
      const __mmask32 mask = __mmask32((uint64_t(1) << (n - i)) - 1);
      _mm512_mask_storeu_epi16(dst + i, mask, _mm512_maskz_loadu_epi16(mask, src + 2 * i));
    }
#else
    memcpy(dst, src, size_t(n) * 2);
#endif
  }
}

// ---- rounding to fewer mantissa bits, the exponent range stays that of float ----

template <int dropped, bool ties_even>
void round_line(float* line, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t u = bits_as<uint32_t>(line[i]);
    uint32_t half = ties_even ? (1u << (dropped - 1)) - 1 + ((u >> dropped) & 1) : 1u << (dropped - 1);
    uint32_t rounded = (u + half) & ~((1u << dropped) - 1);
    line[i] = bits_as<float>((u & 0x7f800000u) == 0x7f800000u ? u : rounded);
  }
}

void round_line_f16(float* line, int64_t n) {
  char chunk[2 * 256];
  for (int64_t i = 0; i < n; i += 256) {
    int64_t length = n - i < 256 ? n - i : 256;
    encode_line_f16(line + i, length, chunk, 2);
    decode_line_f16(chunk, 2, length, line + i);
  }
}

// ---- double ----

void decode_line64(const char* src, int64_t stride, int64_t n, double* dst) {
  if (stride == 8) {
    memcpy(dst, src, size_t(n) * 8);
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = fetch<double>(src + i * stride);
  }
}

// Rounds toward the odd neighbour, so that a second rounding to a format of fewer bits gives the single rounding.
inline float round_to_odd(double d) {
  float f = float(d);
  if (double(f) == d || d != d) return f;
  uint32_t u = bits_as<uint32_t>(f);
  double magnitude = d < 0 ? -d : d;
  if (double(bits_as<float>(u & 0x7fffffffu)) > magnitude) --u;
  return bits_as<float>(u | 1u);
}

template <typename Format>
void encode_line64(const double* src, int64_t n, char* dst, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) {
    typename Format::Bits bits = Format::encode(round_to_odd(src[i]));
    memcpy(dst + i * stride, &bits, sizeof bits);
  }
}
void encode_line64_f32(const double* src, int64_t n, char* dst, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) {
    float value = float(src[i]);
    memcpy(dst + i * stride, &value, sizeof value);
  }
}
void encode_line64_f64(const double* src, int64_t n, char* dst, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) memcpy(dst + i * stride, src + i, 8);
}

}  // namespace

void fill_lines(Isa& isa) {
  isa.vector_bytes = CONVGRAD_VECTOR_BYTES;
  const DecodeLine decode[] = {nullptr,           decode_line<F32>,  decode_line<Bf16>, decode_line_f16,
                               decode_line<E4m3>, decode_line<E5m2>, decode_line<Hif8>};
  const EncodeLine encode[] = {encode_line_f64,   encode_line<F32>,  encode_line<Bf16>, encode_line_f16,
                               encode_line<E4m3>, encode_line<E5m2>, encode_line<Hif8>};
  const EncodeLine64 encode64[] = {encode_line64_f64,   encode_line64_f32,   encode_line64<Bf16>, encode_line64<F16>,
                                   encode_line64<E4m3>, encode_line64<E5m2>, encode_line64<Hif8>};
  for (int i = 0; i < dtype_count; ++i) {
    isa.decode[i] = decode[i];
    isa.encode[i] = encode[i];
    isa.encode64[i] = encode64[i];
  }
  const DecodeBlock blocks[] = {nullptr,            decode_block<F32>,  decode_block<Bf16>, decode_block<F16>,
                                decode_block<E4m3>, decode_block<E5m2>, decode_block<Hif8>};
  for (int i = 0; i < dtype_count; ++i) isa.decode_block[i] = blocks[i];
  isa.copy16 = copy16_block;
  isa.decode64 = decode_line64;
  isa.round_hf32 = round_line<12, false>;
  isa.round_hf32_even = round_line<12, true>;
  isa.round_hf32_10 = round_line<13, false>;
  isa.round_hf32_10_even = round_line<13, true>;
  isa.round_bf16 = round_line<16, true>;
  isa.round_f16 = round_line_f16;
}

}  // namespace convgrad::CONVGRAD_ISA
