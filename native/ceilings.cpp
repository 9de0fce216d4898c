// Measures ceilings with loops that do nothing else: independent multiply-adds in registers, copies of large blocks.
#include "ceilings.h"

#include <algorithm>
#include <atomic>
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

// bf16 numbers of either sign between 1/2 and 2.
struct RandomTiles {
  uint16_t tile[4][16 * 32];
  RandomTiles() {
    uint32_t state = 1;
    for (auto& elements : tile)
      for (uint16_t& element : elements) {
        state = state * 1664525 + 1013904223;
        element = uint16_t((state >> 31 << 15) | (0x3f00 + (state >> 16 & 0xff)));
      }
  }
};

__attribute__((target("amx-tile,amx-bf16"))) double dot_amx_bf16() {
  // NOTE: static, because GCC 12 takes ldtilecfg for a reader of eight bytes and drops the rest of a local object.
  static constexpr struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config{};
  // NOTE: random numbers, as layers have them: with zeros the processor is 1.2 times as fast.
  alignas(64) static const RandomTiles operands;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, operands.tile[0], 64);
  _tile_loadd(5, operands.tile[1], 64);
  _tile_loadd(6, operands.tile[2], 64);
  _tile_loadd(7, operands.tile[3], 64);
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

// The flops of a register loop on all threads.
double run_on_all(RegisterLoop loop, int threads) {
  std::atomic<double> flops{0};
  parallel_for(16ll * threads, threads, [&](int64_t, int) { flops += loop(); });
  return flops;
}

// Its flops per second.
double rate_of(RegisterLoop loop, int threads) {
  loop();
  double best = 0;
  for (int i = 0; i < repetitions; ++i) {
    const double start = now(), flops = run_on_all(loop, threads);
    best = std::max(best, flops / (now() - start));
  }
  return best;
}

// The loops of the level in force, and what they are called; no bf16 loop where there are no such instructions.
struct Loops {
  RegisterLoop f32, bf16;
  const char *f32_name, *bf16_name;
};
Loops loops_of(int level) {
#if defined(__x86_64__)
  constexpr RegisterLoop loops[] = {fma_generic, fma_avx2, fma_avx512};
  constexpr const char* names[] = {"scalar", "AVX2 FMA", "AVX-512 FMA"};
  const int vector_level = std::min(level, 2);
  return {loops[vector_level], level == 4 ? dot_amx_bf16 : level == 3 ? dot_avx512_bf16 : nullptr, names[vector_level],
          level == 4 ? "AMX-BF16 on random numbers" : level == 3 ? "AVX512-BF16" : "none"};
#else
  return {fma_generic, nullptr, "compiled loop", "none"};
#endif
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
  const Loops loops = loops_of(current_isa().level);
  return {rate_of(loops.f32, threads), loops.bf16 ? rate_of(loops.bf16, threads) : 0, copy_rate(threads),
          loops.f32_name, loops.bf16_name};
}

double run_products(bool bf16, int threads) {
  const Loops loops = loops_of(current_isa().level);
  return run_on_all(bf16 && loops.bf16 ? loops.bf16 : loops.f32, threads);
}

}  // namespace convgrad
