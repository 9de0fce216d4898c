// Detection and choice of the instruction set level.
#include "isa.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "gemm.h"
#include "gemm_tile.h"
#include "lines.h"

namespace convgrad {

float hif8_values[256];

namespace {

// The value of a HiFloat8 code: sign, prefix code that gives the exponent's width, exponent, fraction.
float hif8_value(int code) {
  const float sign = code & 0x80 ? -1.0f : 1.0f;
  const int body = code & 0x7f;
  if (code == 0) return 0.0f;
  if (code == 0x80) return __builtin_nanf("");
  if (body == 0x6f) return sign * __builtin_inff();
  if (body < 8) return sign * __builtin_ldexpf(1.0f, body - 23);
  // (first code, width of the exponent, width of the fraction) of each field layout
  constexpr int layouts[][3] = {{0x60, 4, 1}, {0x40, 3, 2}, {0x20, 2, 3}, {0x10, 1, 3}, {0x08, 0, 3}};
  for (const auto& [first, width, kept] : layouts) {
    if (body < first) continue;
    const int field = (body - first) >> kept, fraction = body & ((1 << kept) - 1);
    int exponent = 0;
    if (width > 0) {
      const int size = (1 << (width - 1)) + (field & ((1 << (width - 1)) - 1));
      exponent = field >> (width - 1) ? -size : size;
    }
    return sign * __builtin_ldexpf(1.0f + float(fraction) / float(1 << kept), exponent);
  }
  return 0.0f;
}

struct Levels {
  Isa isa[6] = {};
  GemmKernels gemm[6] = {};
  Gemm twice_as_fast[2] = {};  // the AVX-512 kernels for f32 and f64 as the cost model sees them with two_wide_fmas
  int available = 0;  // the highest level of this machine

  Levels() {
    for (int code = 0; code < 256; ++code) hif8_values[code] = hif8_value(code);
    // The last one is for tests: the kernels of amx with tiles in software. It is never chosen unless named.
    static const char* const names[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated"};
    available = detect();
    for (int level = 0; level < 6; ++level) {
      isa[level].name = names[level];
      isa[level].level = level;
#if defined(__x86_64__)
      isa_pick(level, generic::fill_lines, avx2::fill_lines, avx512::fill_lines)(isa[level]);
      gemm[level] = isa_pick(level, generic::gemm_kernels, avx2::gemm_kernels, avx512::gemm_kernels)();
      // NOTE: a property of the level, never of the machine: it decides the order of sums. AVX-512 without BF16 is
      // Intel's alone, and most of its Xeons start two 512-bit FMAs a cycle. Zen 4, where level 3 was measured, starts one.
      isa[level].two_wide_fmas = level == 2;
      if (isa[level].two_wide_fmas) set_two_wide_fmas(gemm[level]);
      // NOTE: vdpbf16ps does twice the products of an f32 FMA on Zen 4 (measured 233 against 117 GFLOP/s a core) but
      // half of them on Sapphire Rapids (89 against 174): there bf16 operands are multiplied as f32.
      if (level == 3 && (__builtin_cpu_is("amd") || asked_by_name(names[level])))
        gemm[level].bf16 = &gemm_bf16_avx512;
      if (level == 4) set_amx(gemm[level], amx::gemm_bf16, amx::gemm_bf16x2, amx::gemm_bf16x3);
      if (level == 5)
        set_amx(gemm[level], amx_emulated::gemm_bf16, amx_emulated::gemm_bf16x2, amx_emulated::gemm_bf16x3);
#else
      generic::fill_lines(isa[level]);
      gemm[level] = generic::gemm_kernels();
#endif
      isa[level].gemm = &gemm[level];
    }
  }

  // A level that the environment names is used with all its kernels, for tests.
  static bool asked_by_name(const char* level) {
    const char* name = std::getenv("CONVGRAD_ISA");
    return name && !std::strcmp(name, level);
  }

  void set_two_wide_fmas(GemmKernels& kernels) {
    twice_as_fast[0] = *kernels.f32;
    twice_as_fast[1] = *kernels.f64;
    for (Gemm& kernel : twice_as_fast) kernel.flops_cycle *= 2;
    kernels.f32 = &twice_as_fast[0];
    kernels.f64 = &twice_as_fast[1];
  }

  static void set_amx(GemmKernels& kernels, const Gemm& bf16, const Gemm& bf16x2, const Gemm& bf16x3) {
    kernels.bf16 = &bf16;
    kernels.bf16x2 = &bf16x2;
    kernels.bf16x3 = &bf16x3;
  }

  static int detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) return 0;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")))
      return 1;
#if defined(CONVGRAD_EMULATED_BF16)
    return 3;
#endif
    unsigned a, b, c, d;
    if (!(__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5))) return 2;
    // NOTE: never ask CPUID leaf 0x1D for AMX: some virtual machines hide it although the tiles work.
    const bool tile_bits = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 22) && (d & 1u << 24);
    return tile_bits && amx_allowed() ? 4 : 3;
#else
    return 0;
#endif
  }
};

const Levels& levels() {
  static const Levels all;
  return all;
}

}  // namespace

RoundLine Isa::rounding(Dtype operand, Compute compute) const {
  const bool f32 = operand == Dtype::f32;
  switch (compute) {
    case Compute::hf32: return f32 ? round_hf32 : nullptr;
    case Compute::hf32_even: return f32 ? round_hf32_even : nullptr;
    case Compute::hf32_10: return f32 ? round_hf32_10 : nullptr;
    case Compute::hf32_10_even: return f32 ? round_hf32_10_even : nullptr;
    case Compute::bf16: return f32 || operand == Dtype::f16 ? round_bf16 : nullptr;
    case Compute::f16: return f32 || operand == Dtype::bf16 ? round_f16 : nullptr;
    default: return nullptr;
  }
}

const Isa* find_isa(const char* name) {
  for (int level = 0; level <= levels().available; ++level)
    if (!std::strcmp(levels().isa[level].name, name)) return &levels().isa[level];
  // NOTE: the emulation's other tables are those of AVX-512.
  if (levels().available >= 2 && !std::strcmp(levels().isa[5].name, name)) return &levels().isa[5];
  return nullptr;
}

const Isa& current_isa() {
  static const Isa& chosen = []() -> const Isa& {
    if (const char* name = std::getenv("CONVGRAD_ISA"); name && *name) {
      if (const Isa* isa = find_isa(name)) return *isa;
      std::fprintf(stderr, "convgrad: CONVGRAD_ISA=%s is unknown or not available here, ignored\n", name);
    }
    return levels().isa[levels().available];
  }();
  return chosen;
}

}  // namespace convgrad
