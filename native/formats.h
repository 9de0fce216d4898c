// One element of each stored number format: its bits to float (exact) and back (one rounding). For lines.cpp.
#pragma once

#include "lines.h"
#include "simd.h"

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

}  // namespace
}  // namespace convgrad::CONVGRAD_ISA
