// The instruction sets, chosen at run time, and the element conversions each of them provides.
#pragma once

#include <cstdint>

namespace convgrad {

enum class Dtype : uint8_t { f64, f32, bf16, f16, e4m3, e5m2, hif8 };
// hf32 keeps 11 mantissa bits, hf32_10 10 (= tf32); ties go away from zero, or to even.
enum class Compute : uint8_t { f64, f32, hf32, hf32_even, hf32_10, hf32_10_even, bf16, f16 };

inline constexpr int dtype_count = 7;

// A line of n elements, `stride` bytes apart (any, also negative or unaligned), to n contiguous floats, exactly.
using DecodeLine = void (*)(const char* src, int64_t stride, int64_t n, float* dst);
// `lines` lines of n elements, `line_stride` bytes apart, to lines of floats `pitch` elements apart; prefetches ahead.
using DecodeBlock = void (*)(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, float* dst,
                             int64_t pitch);
// Rounds n floats in place (what a compute mode does to operands).
using RoundLine = void (*)(float* line, int64_t n);
// n contiguous floats to n elements, `stride` bytes apart, with one rounding.
using EncodeLine = void (*)(const float* src, int64_t n, char* dst, int64_t stride);
// `lines` lines of n floats, `pitch` elements apart, to lines of elements `line_stride` bytes apart;
// true if one is NaN.
using EncodeBlock = bool (*)(const float* src, int64_t pitch, int64_t lines, int64_t n, char* dst, int64_t line_stride,
                             int64_t stride);
// The same for doubles. Encoding rounds once from double to the type asked for.
using DecodeLine64 = void (*)(const char* src, int64_t stride, int64_t n, double* dst);
using EncodeLine64 = void (*)(const double* src, int64_t n, char* dst, int64_t stride);

struct GemmKernels;  // gemm.h

// One instruction set level. Tables are filled by lines.cpp and the gemm files compiled with that level's flags.
struct Isa {
  const char* name;  // generic, avx2, avx512, avx512_bf16, amx; amx_emulated for tests
  int level;         // 0..5 in that order: each level can also run the kernels of the lower ones
  int vector_bytes;  // 16, 32, 64
  bool two_wide_fmas;  // for the cost models: two 512-bit FMAs start in a cycle; they were measured where one does
  DecodeLine decode[dtype_count];  // [Dtype::f64] is null
  DecodeBlock decode_block[dtype_count];
  EncodeBlock encode_block[dtype_count];
  EncodeLine encode[dtype_count];  // float to any type, also double
  RoundLine round_hf32, round_hf32_even, round_hf32_10, round_hf32_10_even, round_bf16, round_f16;
  // Copies blocks of 16-bit elements as they are.
  void (*copy16)(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, uint16_t* dst,
                 int64_t pitch);
  // The same for pairs of dense lines, interleaved: dst[pair*pitch + 2*i + (line of the pair)].
  void (*pair16)(const char* src, int64_t line_stride, int64_t pairs, int64_t n, uint16_t* dst, int64_t pitch);
  DecodeLine64 decode64;                  // from Dtype::f64
  EncodeLine64 encode64[dtype_count];
  const GemmKernels* gemm;

  // The rounding of a compute mode, null where there is none to do for this operand type.
  RoundLine rounding(Dtype operand, Compute compute) const;
};

// Decodes and rounds in one go: what a packing routine calls.
struct LineReader {
  DecodeLine decode;
  RoundLine round;
  LineReader(const Isa& isa, Dtype dtype, Compute compute)
      : decode(isa.decode[int(dtype)]), round(isa.rounding(dtype, compute)) {}
  void operator()(const char* src, int64_t stride, int64_t n, float* dst) const {
    decode(src, stride, n, dst);
    if (round) round(dst, n);
  }
};

// The level of this machine, or the lower one that the environment variable CONVGRAD_ISA names.
const Isa& current_isa();
// A level by name, or null if unknown or not runnable here.
const Isa* find_isa(const char* name);

}  // namespace convgrad
