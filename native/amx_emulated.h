// The tile instructions in software, for tests on processors without them: gemm_amx.cpp is compiled a second time with
// this header in place of the hardware. Slow, but the same numbers as tdpbf16ps: even and odd products are summed
// apart, subnormal operands and results count as zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace convgrad::amx_emulated {

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) char data[16][64];
};
inline thread_local Tile tiles[8];

inline void configure(const void* config) {
  const uint8_t* bytes = static_cast<const uint8_t*>(config);
  for (int t = 0; t < 8; ++t) {
    tiles[t] = {};
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * t, 2);
    tiles[t].row_bytes = row_bytes;
    tiles[t].rows = bytes[48 + t];
  }
}
inline void release() {
  for (Tile& tile : tiles) tile = {};
}
inline void zero(int t) { std::memset(tiles[t].data, 0, sizeof tiles[t].data); }
inline void load(int t, const void* base, int64_t stride) {
  zero(t);
  for (int row = 0; row < tiles[t].rows; ++row)
    std::memcpy(tiles[t].data[row], static_cast<const char*>(base) + row * stride, size_t(tiles[t].row_bytes));
}
inline void store(int t, void* base, int64_t stride) {
  for (int row = 0; row < tiles[t].rows; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, tiles[t].data[row], size_t(tiles[t].row_bytes));
}

inline float flushed(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }
inline float operand(const char* row, int index) {
  uint16_t bits;
  std::memcpy(&bits, row + 2 * index, 2);
  const uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return flushed(value);
}

inline void dot(int sums, int a, int b) {
  Tile& to = tiles[sums];
  for (int m = 0; m < to.rows; ++m) {
    float even[16] = {}, odd[16] = {}, total[16];
    for (int k = 0; k < tiles[a].row_bytes / 4; ++k)
      for (int n = 0; n < 16; ++n) {
        even[n] = flushed(std::fma(operand(tiles[a].data[m], 2 * k), operand(tiles[b].data[k], 2 * n), even[n]));
        odd[n] = flushed(
            std::fma(operand(tiles[a].data[m], 2 * k + 1), operand(tiles[b].data[k], 2 * n + 1), odd[n]));
      }
    std::memcpy(total, to.data[m], sizeof total);
    for (int n = 0; n < 16; ++n) total[n] = flushed(flushed(total[n]) + flushed(even[n] + odd[n]));
    std::memcpy(to.data[m], total, sizeof total);
  }
}

}  // namespace convgrad::amx_emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) amx_emulated::configure(config)
#define _tile_release() amx_emulated::release()
#define _tile_zero(tile) amx_emulated::zero(tile)
#define _tile_loadd(tile, base, stride) amx_emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_emulated::store(tile, base, stride)
#define _tile_dpbf16ps(sums, a, b) amx_emulated::dot(sums, a, b)
