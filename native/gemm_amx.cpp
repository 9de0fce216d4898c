// The bf16 micro-kernel on AMX: 2 x 2 tiles of 16 x 16 sums, 32 k per step.
// NOTE: tdpbf16ps takes subnormal operands as zero and flushes subnormal results; Inf and NaN come through.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "gemm_tile.h"

namespace convgrad {
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

// Both column halves; `two` says whether there are rows in the lower half.
template <bool two>
void multiply_32(const GemmCall& call) {
  char* c = call.c;
  const int64_t ldc = call.ldc * 4, lower = 16 * ldc;
  if (call.accumulate) {
    _tile_loadd(0, c, ldc);
    _tile_loadd(1, c + 64, ldc);
    if (two) {
      _tile_loadd(2, c + lower, ldc);
      _tile_loadd(3, c + lower + 64, ldc);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < call.batch; ++i) {
    const char *a = call.a + call.a_offset[i], *b = call.b + call.b_offset[i];
    for (int64_t k = 0; k < call.k; k += 32, a += 64, b += 16 * call.ldb) {
      _tile_loadd(6, b, call.ldb);
      _tile_loadd(4, a, call.lda);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 64, call.ldb);
      _tile_dpbf16ps(1, 4, 7);
      if (two) {
        _tile_loadd(5, a + 16 * call.lda, call.lda);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, c, ldc);
  _tile_stored(1, c + 64, ldc);
  if (two) {
    _tile_stored(2, c + lower, ldc);
    _tile_stored(3, c + lower + 64, ldc);
  }
}

template <bool two>
void multiply_16(const GemmCall& call) {
  char* c = call.c;
  const int64_t ldc = call.ldc * 4, lower = 16 * ldc;
  if (call.accumulate) {
    _tile_loadd(0, c, ldc);
    if (two) _tile_loadd(2, c + lower, ldc);
  } else {
    _tile_zero(0);
    _tile_zero(2);
  }
  for (int64_t i = 0; i < call.batch; ++i) {
    const char *a = call.a + call.a_offset[i], *b = call.b + call.b_offset[i];
    for (int64_t k = 0; k < call.k; k += 32, a += 64, b += 16 * call.ldb) {
      _tile_loadd(6, b, call.ldb);
      _tile_loadd(4, a, call.lda);
      _tile_dpbf16ps(0, 4, 6);
      if (two) {
        _tile_loadd(5, a + 16 * call.lda, call.lda);
        _tile_dpbf16ps(2, 5, 6);
      }
    }
  }
  _tile_stored(0, c, ldc);
  if (two) _tile_stored(2, c + lower, ldc);
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

void run(const GemmCall& call) {
  configure(call.rows);
  call.rows > 16 ? multiply_32<true>(call) : multiply_32<false>(call);
}

void run_half(const GemmCall& call) {
  configure(call.rows);
  call.rows > 16 ? multiply_16<true>(call) : multiply_16<false>(call);
}

}  // namespace

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

const Gemm gemm_bf16_amx = {"bf16_f32_32x32_amx", 32, 32, 2, 32, 800, run, run_half, enter, leave};

}  // namespace convgrad
