// Measures ceilings with loops that do nothing else: independent multiply-adds in registers, copies of large blocks.
#include "ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>

#include "isa.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace convgrad {
namespace {

constexpr int64_t steps = 1 << 16;            // of a register loop, per task
constexpr int64_t copy_bytes = 128ll << 20;   // larger than the last-level caches
constexpr int64_t copy_block = 1ll << 20;
constexpr int repetitions = 30;               // short ones, of which the best counts: the rest is disturbance

volatile float sink;
volatile float one = 1.0f;  // read anew for every sum: equal sums would be computed once

// A register loop runs `steps` steps and returns its floating-point operations.
using RegisterLoop = double (*)();

double fma_generic() {
  float sums[32];
  for (float& s : sums) s = one;
  const float factor = one, term = one - 1.0f;
  for (int64_t i = 0; i < steps; ++i)
    for (float& s : sums) s = s * factor + term;
  for (float s : sums) sink = s;
  return 2.0 * 32 * steps;
}

#if defined(__x86_64__)

// Enough independent sums to fill two multiply-add units of latency 4 or 5; written out, so that all stay in registers.
#define CONVGRAD_TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)

__attribute__((target("avx2,fma"))) double fma_avx2() {
  const __m256 factor = _mm256_set1_ps(one), term = _mm256_set1_ps(one - 1.0f);
#define DECLARE(n) __m256 s##n = _mm256_set1_ps(one);
  CONVGRAD_TWELVE(DECLARE)
#undef DECLARE
  for (int64_t i = 0; i < steps; ++i) {
#define STEP(n) s##n = _mm256_fmadd_ps(s##n, factor, term);
    CONVGRAD_TWELVE(STEP)
#undef STEP
  }
#define FOLD(n) sink = _mm256_cvtss_f32(s##n);
  CONVGRAD_TWELVE(FOLD)
#undef FOLD
  return 2.0 * 12 * 8 * steps;
}

__attribute__((target("avx512f"))) double fma_avx512() {
  const __m512 factor = _mm512_set1_ps(one), term = _mm512_set1_ps(one - 1.0f);
#define DECLARE(n) __m512 s##n = _mm512_set1_ps(one);
  CONVGRAD_TWELVE(DECLARE)
#undef DECLARE
  for (int64_t i = 0; i < steps; ++i) {
#define STEP(n) s##n = _mm512_fmadd_ps(s##n, factor, term);
    CONVGRAD_TWELVE(STEP)
#undef STEP
  }
#define FOLD(n) sink = _mm512_cvtss_f32(s##n);
  CONVGRAD_TWELVE(FOLD)
#undef FOLD
  return 2.0 * 12 * 16 * steps;
}

__attribute__((target("avx512f,avx512bf16"))) double dot_avx512_bf16() {
  const __m512bh pairs = (__m512bh)_mm512_set1_epi32(one > 0 ? 0x3f803f80 : 0);  // bf16 ones
#define DECLARE(n) __m512 s##n = _mm512_set1_ps(one);
  CONVGRAD_TWELVE(DECLARE)
#undef DECLARE
  for (int64_t i = 0; i < steps; ++i) {
#define STEP(n) s##n = _mm512_dpbf16_ps(s##n, pairs, pairs);
    CONVGRAD_TWELVE(STEP)
#undef STEP
  }
#define FOLD(n) sink = _mm512_cvtss_f32(s##n);
  CONVGRAD_TWELVE(FOLD)
#undef FOLD
  return 2.0 * 12 * 32 * steps;
}

__attribute__((target("amx-tile,amx-bf16"))) double dot_amx_bf16() {
  // NOTE: static, because GCC 12 takes ldtilecfg for a reader of eight bytes and drops the rest of a local object.
  static constexpr struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config{};
  alignas(64) static const uint16_t zeros[16 * 32] = {};
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  for (int64_t i = 0; i < steps / 16; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 2.0 * 4 * 16 * 16 * 32 * (steps / 16);
}

#endif

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Flops per second of a register loop on all threads.
double rate_of(RegisterLoop loop, int threads) {
  const int64_t tasks = 16ll * threads;
  const double flops = loop() * double(tasks);
  double best = 0;
  for (int i = 0; i < repetitions; ++i) {
    const double start = now();
    parallel_for(tasks, threads, [&](int64_t, int) { loop(); });
    best = std::max(best, flops / (now() - start));
  }
  return best;
}

void copy_cached(const char* from, char* to) { std::memcpy(to, from, copy_block); }

// Stores that bypass the caches: the written lines need not be read first.
void copy_streaming(const char* from, char* to) {
#if defined(__x86_64__)
  for (int64_t i = 0; i < copy_block; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
  _mm_sfence();
#else
  copy_cached(from, to);
#endif
}

double copy_rate(int threads) {
  constexpr size_t alignment = 64;
  const auto from = std::make_unique<char[]>(copy_bytes + alignment);
  const auto to = std::make_unique<char[]>(copy_bytes + alignment);
  const auto aligned = [](char* p) { return p + (alignment - reinterpret_cast<uintptr_t>(p) % alignment) % alignment; };
  char *source = aligned(from.get()), *target = aligned(to.get());
  double best = 0;
  for (const auto copy : {copy_cached, copy_streaming})
    for (int i = 0; i < repetitions; ++i) {
      const double start = now();
      parallel_for(copy_bytes / copy_block, threads,
                   [&](int64_t task, int) { copy(source + task * copy_block, target + task * copy_block); });
      best = std::max(best, 2.0 * double(copy_bytes) / (now() - start));
    }
  return best;
}

}  // namespace

Ceilings measure_ceilings(int threads) {
  const int level = current_isa().level;
  Ceilings found{};
#if defined(__x86_64__)
  constexpr RegisterLoop loops[] = {fma_generic, fma_avx2, fma_avx512};
  constexpr const char* names[] = {"scalar", "AVX2 FMA", "AVX-512 FMA"};
  const int vector_level = std::min(level, 2);
  found.f32_flops = rate_of(loops[vector_level], threads);
  found.f32_instructions = names[vector_level];
  found.bf16_flops = level == 4 ? rate_of(dot_amx_bf16, threads) : level == 3 ? rate_of(dot_avx512_bf16, threads) : 0;
  found.bf16_instructions = level == 4 ? "AMX-BF16" : level == 3 ? "AVX512-BF16" : "none";
#else
  found.f32_flops = rate_of(fma_generic, threads);
  found.f32_instructions = "compiled loop";
  found.bf16_instructions = "none";
#endif
  found.copy_bytes = copy_rate(threads);
  return found;
}

}  // namespace convgrad
