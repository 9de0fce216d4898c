// Packing: a matrix of (positions x channels) read by strides, converted, and laid out the way the micro-kernels read.
#pragma once

#include "conv.h"
#include "gemm.h"

namespace convgrad {

// How an element type of packed operands is summed and paired. Bf16 is its bits.
struct Bf16 {
  uint16_t bits;
};
template <typename T>
struct Packed;
template <>
struct Packed<float> {
  using Sum = float;
  static constexpr int pair = 1;
  static const Gemm* gemm(const Isa& isa) { return isa.gemm->f32; }
};
template <>
struct Packed<double> {
  using Sum = double;
  static constexpr int pair = 1;
  static const Gemm* gemm(const Isa& isa) { return isa.gemm->f64; }
};
template <>
struct Packed<Bf16> {
  using Sum = float;
  static constexpr int pair = 2;
  static const Gemm* gemm(const Isa& isa) { return isa.gemm->bf16; }
};

// Where element (position p, channel c) goes, in elements of the destination:
enum class Arrange {
  by_position,     // p*pitch + c
  by_channel,      // c*pitch + p
  channel_pairs,   // (c/pair)*pitch + p*pair + c%pair
  position_pairs,  // (p/pair)*pitch + c*pair + p%pair
};

// Whether sums of products of bf16 parts are as good as those of f32: all finite, no sum overflows half-way, no part
// and no product of parts is so small that it would count as zero. NOTE: exponents are biased, 2^-100 is 27.
inline bool parts_suffice(const Magnitudes& a, const Magnitudes& b) {
  const uint32_t low_a = a.smallest >> 23, low_b = b.smallest >> 23, high_a = a.largest >> 23, high_b = b.largest >> 23;
  return low_a >= 27 && low_b >= 27 && low_a + low_b >= 2 * 127 - 100 && high_a < 255 && high_b < 255 &&
         high_a + high_b <= 2 * 127 + 100;
}

// Positions outside [first, last) and channels from `channels` on are written as zeros.
struct Matrix {
  const char* data;  // of position 0, channel 0 (which may lie outside of the array)
  int64_t position_stride, channel_stride;  // bytes
  int64_t positions, first, last;
  int64_t channels, channels_padded;
};

template <typename T>
class Packer {
 public:
  Packer(const Isa& isa, Dtype dtype, Compute compute, int parts = 1);
  // The same for operands in parts, whose planes lie so many elements apart in the destination; met nothing yet.
  Packer with_plane(int64_t plane) const {
    Packer packer = *this;
    packer.plane_ = plane;
    packer.met_ = {};
    return packer;
  }
  // Of all elements that were split into parts.
  const Magnitudes& met() const { return met_; }
  void operator()(const Matrix& matrix, Arrange arrange, T* dst, int64_t pitch) const;
  // Whether packing changes no bit of an element.
  bool stored_as_packed() const {
    return !reader_.round && dtype_ == (sizeof(T) == 8 ? Dtype::f64 : sizeof(T) == 4 ? Dtype::f32 : Dtype::bf16);
  }
  // n neighbouring elements as they are, converted and rounded.
  void line(const char* src, int64_t n, T* dst) const { read(src, 0, size_of(dtype_), 1, n, dst, 0, plane_); }

 private:
  struct Lines;
  struct Whole {
    int64_t first, last;
  };
  Whole whole_pairs(const Lines& lines) const;
  void read(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, T* dst, int64_t pitch,
            int64_t plane) const;
  void read_block(const Lines& lines, int64_t line, int64_t count, int64_t from, int64_t n, T* dst, int64_t pitch,
                  int64_t plane) const;
  bool words_lie_dense(const Lines& lines) const;
  void transpose_words(const Lines& lines, uint32_t* dst, int64_t pitch) const;
  void pack_same(const Lines& lines, T* dst, int64_t pitch) const;
  void pack_pairs(const Lines& lines, T* dst, int64_t pitch) const;
  void pack_edge(const Lines& lines, int64_t line, T* dst) const;
  void pack_transposed(const Lines& lines, T* dst, int64_t pitch) const;
  void pack_pairs_transposed(const Lines& lines, T* dst, int64_t pitch) const;

  const Isa& isa_;
  LineReader reader_;
  Dtype dtype_;
  int parts_;
  int64_t plane_ = 0;
  mutable Magnitudes met_;
};

}  // namespace convgrad
