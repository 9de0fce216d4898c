// Conversions of lines of elements between the stored number formats and float; compiled once per level.
#include "lines.h"

#include "formats.h"
#include "simd.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace convgrad::CONVGRAD_ISA {
namespace {

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
  constexpr int64_t size = sizeof(typename Format::Bits);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(dst + i, load_vector(Format{}, src + i * size, 0xffff));
  if (i < n) {
    const __mmask16 mask = __mmask16((1u << (n - i)) - 1);
    _mm512_mask_storeu_ps(dst + i, mask, load_vector(Format{}, src + i * size, mask));
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

#if defined(__AVX512F__)
// Every second element of dense lines; never reads past the last one wanted.
inline __m512i second_of_two(__m512i a, __m512i b, uint16_t) {
  // The low halves of the 32-bit words are the elements wanted.
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)), _mm512_cvtepi32_epi16(b), 1);
}
inline __m512i second_of_two(__m512i a, __m512i b, float) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return _mm512_permutex2var_epi32(a, even, b);
}
template <typename Element>
inline void take_second(const char* src, int64_t line_stride, int64_t lines, int64_t n, Element* dst, int64_t pitch) {
  constexpr int64_t lanes = 64 / sizeof(Element);
  const auto first = [](int64_t bytes) {
    return bytes >= 64 ? ~uint64_t(0) : bytes <= 0 ? uint64_t(0) : (uint64_t(1) << bytes) - 1;
  };
  for (int64_t i = 0; i < n; i += lanes) {
    const int64_t count = n - i < lanes ? n - i : lanes, wanted = (2 * count - 1) * int64_t(sizeof(Element));
    const __mmask64 low = first(wanted), high = first(wanted - 64), out = first(count * int64_t(sizeof(Element)));
    const char* from = src + 2 * i * int64_t(sizeof(Element));
    Element* to = dst + i;
    for (int64_t line = 0; line < lines; ++line, from += line_stride, to += pitch)
      _mm512_mask_storeu_epi8(to, out, second_of_two(_mm512_maskz_loadu_epi8(low, from),
                                                     _mm512_maskz_loadu_epi8(high, from + 64), Element{}));
  }
}
#endif

template <typename Format>
void decode_block(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, float* dst,
                  int64_t pitch) {
  constexpr int64_t size = sizeof(typename Format::Bits);
#if defined(__AVX512F__)
  if (stride == 2 * size && size == 4) return take_second(src, line_stride, lines, n, dst, pitch);
#endif
  for (int64_t line = 0; line < lines; ++line, src += line_stride, dst += pitch) {
    if (stride == size) {
      if (line + lines_ahead < lines) prefetch_line(src + lines_ahead * line_stride, n * size);
      decode_dense<Format>(src, n, dst);
#if defined(__AVX512F__)
    } else if (stride == 2 * size && size == 2) {
      alignas(64) uint16_t part[256];
      for (int64_t i = 0; i < n; i += 256) {
        const int64_t count = n - i < 256 ? n - i : 256;
        take_second(src + i * stride, 0, 1, count, part, 0);
        decode_dense<Format>(reinterpret_cast<const char*>(part), count, dst + i);
      }
#endif
    } else {
#pragma GCC unroll 4
      for (int64_t i = 0; i < n; ++i) dst[i] = Format::decode(fetch<typename Format::Bits>(src + i * stride));
    }
  }
}

void copy16_block(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, uint16_t* dst,
                  int64_t pitch) {
#if defined(__AVX512F__)
  if (stride == 4) return take_second(src, line_stride, lines, n, dst, pitch);
#endif
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

void pair16_block(const char* src, int64_t line_stride, int64_t pairs, int64_t n, uint16_t* dst, int64_t pitch) {
#if defined(__AVX512F__)
  // Words of two lines, alternately: the lower halves of both lines, then the upper ones.
  const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i lower = _mm512_or_si512(count, _mm512_slli_epi32(_mm512_add_epi32(count, _mm512_set1_epi32(32)), 16));
  const __m512i upper = _mm512_add_epi16(lower, _mm512_set1_epi16(16));
#endif
  for (int64_t pair = 0; pair < pairs; ++pair, src += 2 * line_stride, dst += pitch) {
    if (pair + lines_ahead / 2 < pairs) {
      prefetch_line(src + lines_ahead * line_stride, n * 2);
      prefetch_line(src + (lines_ahead + 1) * line_stride, n * 2);
    }
    const char* odd = src + line_stride;
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 32 <= n; i += 32) {
      const __m512i a = _mm512_loadu_si512(src + 2 * i), b = _mm512_loadu_si512(odd + 2 * i);
      _mm512_storeu_si512(dst + 2 * i, _mm512_permutex2var_epi16(a, lower, b));
      _mm512_storeu_si512(dst + 2 * i + 32, _mm512_permutex2var_epi16(a, upper, b));
    }
    for (; i + 16 <= n; i += 16) {
      const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(src + 2 * i)));
      const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(odd + 2 * i)));
      _mm512_storeu_si512(dst + 2 * i, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
#endif
    for (; i < n; ++i) {
      dst[2 * i] = fetch<uint16_t>(src + 2 * i);
      dst[2 * i + 1] = fetch<uint16_t>(odd + 2 * i);
    }
  }
}

#if defined(__AVX512F__)
inline void store_vector(F32, char* dst, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(dst, mask, v); }
inline void store_vector(F16, char* dst, __mmask16 mask, __m512 v) {
  _mm256_mask_storeu_epi16(dst, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_vector(Bf16, char* dst, __mmask16 mask, __m512 v) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, _mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  _mm256_mask_storeu_epi16(dst, mask, _mm512_cvtepi32_epi16(r));
}
#endif

#if defined(__AVX512F__)
// 32 floats; says whether one is NaN.
template <typename Format>
inline int store_two_vectors(Format, char* dst, const float* src) {
  const __m512 a = _mm512_loadu_ps(src), b = _mm512_loadu_ps(src + 16);
  store_vector(Format{}, dst, 0xffff, a);
  store_vector(Format{}, dst + 32, 0xffff, b);
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}
template <>
inline int store_two_vectors<Bf16>(Bf16, char* dst, const float* src) {
  alignas(64) static constexpr uint16_t upper_halves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                            23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                            45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512 a = _mm512_loadu_ps(src), b = _mm512_loadu_ps(src + 16);
  const int nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
  if (__builtin_expect(nan, 0)) {
    store_vector(Bf16{}, dst, 0xffff, a);
    store_vector(Bf16{}, dst + 32, 0xffff, b);
    return nan;
  }
  const __m512i one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff);
  const auto rounded = [&](__m512i u) {
    return _mm512_add_epi32(_mm512_add_epi32(u, half), _mm512_and_si512(_mm512_srli_epi32(u, 16), one));
  };
  const __m512i pick = _mm512_load_si512(upper_halves);
  _mm512_storeu_si512(dst, _mm512_permutex2var_epi16(rounded(_mm512_castps_si512(a)), pick,
                                                     rounded(_mm512_castps_si512(b))));
  return 0;
}
#endif

template <typename Format, bool vectors>
bool encode_block(const float* src, int64_t pitch, int64_t lines, int64_t n, char* dst, int64_t line_stride,
                  int64_t stride) {
  [[maybe_unused]] constexpr int64_t size = sizeof(typename Format::Bits);
  int nan = 0;
  for (int64_t line = 0; line < lines; ++line, src += pitch, dst += line_stride) {
#if defined(__AVX512F__)
    if constexpr (vectors) {
      if (stride == size) {
        int64_t i = 0;
        if constexpr (size == 2)
          for (; i + 32 <= n; i += 32) nan |= store_two_vectors(Format{}, dst + i * size, src + i);
        for (; i < n; i += 16) {
          const __mmask16 mask = __mmask16(n - i < 16 ? (1u << (n - i)) - 1 : 0xffffu);
          const __m512 v = _mm512_maskz_loadu_ps(mask, src + i);
          nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
          store_vector(Format{}, dst + i * size, mask, v);
        }
        continue;
      }
      // Strided: converted together, stored one by one.
      alignas(64) typename Format::Bits part[16];
      for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = __mmask16(n - i < 16 ? (1u << (n - i)) - 1 : 0xffffu);
        const __m512 v = _mm512_maskz_loadu_ps(mask, src + i);
        nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        store_vector(Format{}, reinterpret_cast<char*>(part), 0xffff, v);
        for (int64_t j = 0; j < (n - i < 16 ? n - i : 16); ++j) memcpy(dst + (i + j) * stride, part + j, size);
      }
      continue;
    }
#endif
    for (int64_t i = 0; i < n; ++i) nan |= src[i] != src[i];
    encode_line<Format>(src, n, dst, stride);
  }
  return nan != 0;
}

bool encode_block_f64(const float* src, int64_t pitch, int64_t lines, int64_t n, char* dst, int64_t line_stride,
                      int64_t stride) {
  int nan = 0;
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t i = 0; i < n; ++i) nan |= src[line * pitch + i] != src[line * pitch + i];
    encode_line_f64(src + line * pitch, n, dst + line * line_stride, stride);
  }
  return nan != 0;
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
  const float f = float(d);
  const double back = f;
  const uint32_t beyond = __builtin_fabs(back) > __builtin_fabs(d), inexact = back != d;
  return bits_as<float>((bits_as<uint32_t>(f) - beyond) | inexact);
}

template <typename Format>
void encode_line64(const double* src, int64_t n, char* dst, int64_t stride) {
  constexpr int64_t length = 256;
  float odd[length];  // in between, so that both loops are of one width
  for (int64_t i = 0; i < n; i += length) {
    const int64_t count = n - i < length ? n - i : length;
    for (int64_t j = 0; j < count; ++j) odd[j] = round_to_odd(src[i + j]);
    encode_line<Format>(odd, count, dst + i * stride, stride);
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
  const EncodeBlock encode_blocks[] = {encode_block_f64,          encode_block<F32, true>,   encode_block<Bf16, true>,
                                       encode_block<F16, true>,   encode_block<E4m3, false>, encode_block<E5m2, false>,
                                       encode_block<Hif8, false>};
  for (int i = 0; i < dtype_count; ++i) {
    isa.decode_block[i] = blocks[i];
    isa.encode_block[i] = encode_blocks[i];
  }
  isa.pair16 = pair16_block;
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
