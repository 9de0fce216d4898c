// The micro-kernels on AMX: 2 x 2 tiles of 16 x 16 sums, 32 k per step; for bf16 operands, and for wider ones that are
// sums of two or three bf16 parts.
// NOTE: tdpbf16ps takes subnormal operands as zero and flushes subnormal results; Inf and NaN come through.
#ifdef CONVGRAD_EMULATED_TILES
#define CONVGRAD_AMX amx_emulated
#include "amx_emulated.h"
#else
#define CONVGRAD_AMX amx
#include <immintrin.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "gemm_tile.h"

namespace convgrad {
namespace CONVGRAD_AMX {
namespace {

// Layout that ldtilecfg reads: palette 1, bytes per row and number of rows of each of the eight tiles.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3 hold the sums (row half, column half), 4-5 the two row halves of A, 6-7 the two column halves of B.
struct Configs {
  TileConfig of_rows[33];
  Configs() {
    for (int rows = 1; rows <= 32; ++rows) {
      const uint8_t upper = uint8_t(rows < 16 ? rows : 16), lower = uint8_t(rows > 16 ? rows - 16 : 16);
      const uint8_t heights[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
      for (int tile = 0; tile < 8; ++tile) {
        of_rows[rows].rows[tile] = heights[tile];
        of_rows[rows].bytes_per_row[tile] = 64;
      }
    }
  }
};
const Configs configs;

// One step of 32 k. `two`: there are rows in the lower half; `wide`: there are columns in the right half.
template <bool two, bool wide>
struct Step {
  const GemmCall& call;

  void load_a(const char* a) const {
    _tile_loadd(4, a, call.lda);
    if (two) _tile_loadd(5, a + 16 * call.lda, call.lda);
  }
  void load_b(const char* b) const {
    _tile_loadd(6, b, call.ldb);
    if (wide) _tile_loadd(7, b + 64, call.ldb);
  }
  void multiply() const {
    _tile_dpbf16ps(0, 4, 6);
    if (wide) _tile_dpbf16ps(1, 4, 7);
    if (two) _tile_dpbf16ps(2, 5, 6);
    if (two && wide) _tile_dpbf16ps(3, 5, 7);
  }

  void of_one(const char* a, const char* b) const {
    _tile_loadd(6, b, call.ldb);
    _tile_loadd(4, a, call.lda);
    _tile_dpbf16ps(0, 4, 6);
    if (wide) {
      _tile_loadd(7, b + 64, call.ldb);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (two) {
      _tile_loadd(5, a + 16 * call.lda, call.lda);
      _tile_dpbf16ps(2, 5, 6);
      if (wide) _tile_dpbf16ps(3, 5, 7);
    }
  }
  // All four products of two parts, in the order that loads least.
  void of_two(const char* a, const char* b) const {
    load_a(a + call.a_plane);
    load_b(b + call.b_plane);
    multiply();
    load_b(b);
    multiply();
    load_a(a);
    multiply();
    load_b(b + call.b_plane);
    multiply();
  }
  // The six products of three parts that matter: a second times a third part is below 2^-24 of the whole.
  void of_three(const char* a, const char* b) const {
    load_a(a);
    load_b(b + 2 * call.b_plane);
    multiply();
    load_b(b + call.b_plane);
    multiply();
    load_a(a + call.a_plane);
    multiply();
    load_b(b);
    multiply();
    load_a(a + 2 * call.a_plane);
    multiply();
    load_a(a);
    multiply();
  }
};

// The taps are the inner loop: they read the same pixels, shifted, so A comes from L1 but for the first tap.
template <int parts, bool two, bool wide>
void multiply(const GemmCall& call) {
  char* c = call.c;
  const int64_t ldc = call.ldc * 4, lower = 16 * ldc;
  if (call.accumulate) {
    _tile_loadd(0, c, ldc);
    if (wide) _tile_loadd(1, c + 64, ldc);
    if (two) _tile_loadd(2, c + lower, ldc);
    if (two && wide) _tile_loadd(3, c + lower + 64, ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const Step<two, wide> step{call};
  for (int64_t k = 0; k < call.k / 32; ++k) {
    const char *a = call.a + 64 * k, *b = call.b + 16 * call.ldb * k;
    for (int64_t i = 0; i < call.batch; ++i)
      parts == 1   ? step.of_one(a + call.a_offset[i], b + call.b_offset[i])
      : parts == 2 ? step.of_two(a + call.a_offset[i], b + call.b_offset[i])
                   : step.of_three(a + call.a_offset[i], b + call.b_offset[i]);
  }
  _tile_stored(0, c, ldc);
  if (wide) _tile_stored(1, c + 64, ldc);
  if (two) _tile_stored(2, c + lower, ldc);
  if (two && wide) _tile_stored(3, c + lower + 64, ldc);
}

// NOTE: a configuration outlives no task: another library in this thread may have its own. Inside a task it is loaded
// when the number of rows changes, because loading it waits for all tiles in flight.
thread_local int configured_rows = 0;

void enter() { configured_rows = 0; }
void leave() {
  if (configured_rows) _tile_release();
  configured_rows = 0;
}

inline void configure(int rows) {
  if (rows == configured_rows) return;
  _tile_loadconfig(&configs.of_rows[rows]);
  configured_rows = rows;
}

template <int parts, bool wide>
void run(const GemmCall& call) {
  configure(call.rows);
  call.rows > 16 ? multiply<parts, true, wide>(call) : multiply<parts, false, wide>(call);
}

}  // namespace

// Products per cycle as sustained from L2, not the peak of 1024 flops.
const Gemm gemm_bf16 = {"bf16_f32_32x32_amx", 32, 32, 2, 32, 800, run<1, true>, run<1, false>, enter, leave, 1};
const Gemm gemm_bf16x2 = {"bf16x2_f32_32x32_amx", 32, 32, 2, 32, 220, run<2, true>, run<2, false>, enter, leave, 2};
const Gemm gemm_bf16x3 = {"bf16x3_f32_32x32_amx", 32, 32, 2, 32, 150, run<3, true>, run<3, false>, enter, leave, 3};

}  // namespace CONVGRAD_AMX

#ifndef CONVGRAD_EMULATED_TILES
bool amx_allowed() {
  static const bool allowed = [] {
    // The operating system must save the tiles (XCR0 bits 17 and 18) and grant their use to this process.
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & (3u << 17)) != (3u << 17)) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return allowed;
}
#endif

}  // namespace convgrad
