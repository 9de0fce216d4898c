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

// Into L1. NOTE: the compiler drops calls of functions that do nothing but __builtin_prefetch.
inline void fetch(const char* p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }
// As GemmCall::fetch names it.
inline void fetch_line(const char* p) {
  if (reinterpret_cast<uintptr_t>(p) & 1) {
    asm volatile("prefetchw %0" : : "m"(*p));
  } else {
    asm volatile("prefetcht1 %0" : : "m"(*p));
  }
}

// So many steps ahead the tiles of B are brought from L2 to L1. NOTE: with a core to itself the loop needs no help (64
// cycles a step, the peak, with B in L2 and A in L1), layers are about 3 % slower with it; when the loop takes four times
// as long, as beside a busy neighbour on the core, it saves a fifth. To fetch A as well never helped.
constexpr int64_t steps_ahead = 2;

// Walks through the steps of a call: all entries of the batch for 32 k, then for the next 32 k, and so on.
struct Cursor {
  const char* b;
  int64_t entry = 0, k = 0;
};

// Sums of tiles that wait beside them, so that none passes through too many roundings.
template <bool two, bool wide>
class Waiting {
 public:
  // Adds the tiles to what waits, and clears them.
  void take() {
    alignas(64) float now[32 * 32];
    store_tiles(any_ ? now : sums_);
    for (int i = 0; any_ && i < (two ? 32 : 16) * 32; ++i) sums_[i] += now[i];
    any_ = true;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  bool any() const { return any_; }
  void leave(const GemmCall& call, bool add) const {
    for (int row = 0; row < call.rows; ++row)
      for (int half = 0; half < (wide ? 2 : 1); ++half) {
        float* to = reinterpret_cast<float*>(call.c + row * call.ldc * 4 + half * call.c_right);
        const float* from = sums_ + row * 32 + half * 16;
        for (int i = 0; i < 16; ++i) to[i] = add ? to[i] + from[i] : from[i];
      }
  }

 private:
  static void store_tiles(float* to) {
    _tile_stored(0, to, 128);
    if (wide) _tile_stored(1, to + 16, 128);
    if (two) _tile_stored(2, to + 16 * 32, 128);
    if (two && wide) _tile_stored(3, to + 16 * 32 + 16, 128);
  }

  alignas(64) float sums_[32 * 32];  // once there are any
  bool any_ = false;
};

// `two`: there are rows in the lower half; `wide`: there are columns in the right half; `far`: B is in L2.
template <int parts, bool two, bool wide, bool far>
class Product {
 public:
  explicit Product(const GemmCall& call)
      : call_(call), b_step_(call.b_step ? call.b_step : 16 * call.ldb), line_(call.fetch),
        last_line_(call.fetch + call.fetch_count),
        lines_per_step_(call.fetch_count / (call.batch * (call.k / 32) + 1) + 1), ahead_{call.b} {
    if (far)
      for (int64_t i = 0; i < steps_ahead; ++i) advance();
  }

  // Entries are the inner loop: the taps of a convolution read the same pixels, shifted, so A stays in L1.
  void sum(Waiting<two, wide>& waiting) {
    constexpr int64_t most = most_tile_roundings / (parts == 1 ? 1 : parts == 2 ? 4 : 6);
    int64_t steps = 0;
    for (int64_t k = 0; k < call_.k / 32; ++k) {
      const char *a = call_.a + 64 * k, *b = call_.b + b_step_ * k;
      for (int64_t i = 0; i < call_.batch; ++i) {
        if (steps++ == most) {
          waiting.take();
          steps = 1;
        }
        const char *a_tile = a + call_.a_offset[i], *b_tile = b + call_.b_offset[i];
        if (parts == 1) one_part(a_tile, b_tile);
        if (parts == 2) two_parts(a_tile, b_tile);
        if (parts == 3) three_parts(a_tile, b_tile);
        for (int64_t n = 0; n < lines_per_step_ && line_ < last_line_; ++n) fetch_line(*line_++);
        if (far) advance();
      }
    }
  }

 private:
  void load_a(const char* a) const {
    _tile_loadd(4, a, call_.lda);
    if (two) _tile_loadd(5, a + 16 * call_.lda, call_.lda);
  }
  void load_b(const char* b) const {
    _tile_loadd(6, b, call_.ldb);
    if (wide) _tile_loadd(7, b + call_.b_right, call_.ldb);
  }
  void multiply() const {
    _tile_dpbf16ps(0, 4, 6);
    if (wide) _tile_dpbf16ps(1, 4, 7);
    if (two) _tile_dpbf16ps(2, 5, 6);
    if (two && wide) _tile_dpbf16ps(3, 5, 7);
  }

  void one_part(const char* a, const char* b) const {
    _tile_loadd(6, b, call_.ldb);
    _tile_loadd(4, a, call_.lda);
    fetch_b(0, 0);
    _tile_dpbf16ps(0, 4, 6);
    if (wide) {
      _tile_loadd(7, b + call_.b_right, call_.ldb);
      fetch_b(0, call_.b_right);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (two) {
      _tile_loadd(5, a + 16 * call_.lda, call_.lda);
      _tile_dpbf16ps(2, 5, 6);
      if (wide) _tile_dpbf16ps(3, 5, 7);
    }
  }
  // All four products, in the order that loads least.
  void two_parts(const char* a, const char* b) const {
    load_a(a + call_.a_plane);
    load_b(b + call_.b_plane);
    fetch_b(0, 0);
    multiply();
    load_b(b);
    if (wide) fetch_b(0, call_.b_right);
    fetch_b(1, 0);
    multiply();
    load_a(a);
    if (wide) fetch_b(1, call_.b_right);
    multiply();
    load_b(b + call_.b_plane);
    multiply();
  }
  // The six products that matter: a second times a third part is below 2^-24 of the whole.
  void three_parts(const char* a, const char* b) const {
    load_a(a);
    load_b(b + 2 * call_.b_plane);
    fetch_b(0, 0);
    multiply();
    load_b(b + call_.b_plane);
    if (wide) fetch_b(0, call_.b_right);
    multiply();
    load_a(a + call_.a_plane);
    fetch_b(1, 0);
    multiply();
    load_b(b);
    if (wide) fetch_b(1, call_.b_right);
    multiply();
    load_a(a + 2 * call_.a_plane);
    fetch_b(2, 0);
    multiply();
    load_a(a);
    if (wide) fetch_b(2, call_.b_right);
    multiply();
  }

  void fetch_b(int part, int64_t column) const {
    if (!far) return;
    const char* b = ahead_.b + call_.b_offset[ahead_.entry] + part * call_.b_plane + column;
#pragma GCC unroll 16
    for (int row = 0; row < 16; ++row) fetch(b + row * call_.ldb);
  }
  void advance() {
    if (++ahead_.entry < call_.batch) return;
    ahead_.entry = 0;
    ahead_.b += b_step_;
    if (++ahead_.k < call_.k / 32) return;
    ahead_.k = 0;
    ahead_.b = call_.next_b ? call_.next_b : call_.b;
  }

  const GemmCall& call_;
  const int64_t b_step_;
  const char* const* line_;
  const char* const* last_line_;
  const int64_t lines_per_step_;
  Cursor ahead_;
};

template <int parts, bool two, bool wide>
void multiply(const GemmCall& call) {
  char* c = call.c;
  const int64_t ldc = call.ldc * 4, lower = 16 * ldc, right = call.c_right;
  if (call.accumulate && !call.apart) {
    _tile_loadd(0, c, ldc);
    if (wide) _tile_loadd(1, c + right, ldc);
    if (two) _tile_loadd(2, c + lower, ldc);
    if (two && wide) _tile_loadd(3, c + lower + right, ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  if (call.next_c)
    for (int row = 0; row < call.rows; ++row) {
      fetch(call.next_c + row * ldc);
      if (wide) fetch(call.next_c + row * ldc + right);
    }
  Waiting<two, wide> waiting;
  if (call.far) {
    Product<parts, two, wide, true>(call).sum(waiting);
  } else {
    Product<parts, two, wide, false>(call).sum(waiting);
  }
  if (waiting.any() || (call.accumulate && call.apart)) {
    waiting.take();
    return waiting.leave(call, call.accumulate && call.apart);
  }
  _tile_stored(0, c, ldc);
  if (wide) _tile_stored(1, c + right, ldc);
  if (two) _tile_stored(2, c + lower, ldc);
  if (two && wide) _tile_stored(3, c + lower + right, ldc);
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

// NOTE: takes subnormal sums as zero, which tiles do not produce.
bool store_bf16(const float* sums, int64_t pitch, int64_t rows, char* dst, int64_t row_stride) {
  bool nan = false;
#ifdef CONVGRAD_EMULATED_TILES
  for (int64_t row = 0; row < rows; ++row, sums += pitch, dst += row_stride)
    for (int64_t i = 0; i < 32; ++i) {
      uint32_t word;
      memcpy(&word, sums + i, 4);
      const bool is_nan = sums[i] != sums[i];
      const uint16_t bits = uint16_t(is_nan ? word >> 16 | 0x40 : (word + 0x7fff + (word >> 16 & 1)) >> 16);
      memcpy(dst + 2 * i, &bits, 2);
      nan |= is_nan;
    }
#else
  for (int64_t row = 0; row < rows; ++row, sums += pitch, dst += row_stride) {
    const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + 16);
    nan |= _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q) != 0;
    _mm512_storeu_si512(dst, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
#endif
  return nan;
}

}  // namespace

// Products per cycle as sustained from L2, not the peak of 1024 flops.
const Gemm gemm_bf16 = {"bf16_f32_32x32_amx", 32, 32, 2, 32, 800, run<1, true>, run<1, false>, enter, leave, 1, 2048,
                        0, false, store_bf16};
const Gemm gemm_bf16x2 = {"bf16x2_f32_32x32_amx", 32, 32, 2, 32, 220, run<2, true>, run<2, false>, enter, leave,
                          2, 512};
const Gemm gemm_bf16x3 = {"bf16x3_f32_32x32_amx", 32, 32, 2, 32, 150, run<3, true>, run<3, false>, enter, leave,
                          3, 512};

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
