// Depthwise and grouped convolutions with channels last, computed where the tensors lie: channels are the lanes.
//
// Nothing is brought into lane form: a "unit" of channels (64 bytes with AVX-512) is read, multiplied and written as it
// lies in memory. Where the channels are not a multiple of a unit the last one overlaps its neighbour: the channels
// they share are computed twice, to the same bits.
#pragma once

#include "lanes.h"

namespace convgrad {

// Where tensor elements and weights of a unit are.
// NOTE: its functions are inlined always, so that none compiled for a higher level is linked into code for every CPU.
struct DirectUnits {
  Dtype dtype;      // f32, bf16 or f16
  int64_t lanes;    // of a vector of floats
  int64_t channels; // of the tensors, at least one unit
  int64_t pair = 0; // of taps along y that one instruction takes together (vdpbf16ps), this far apart; 0: there is none
  // Channels of a group of the result and of the source; zero: depthwise. Groups need AVX-512; a unit is one vector.
  int64_t group_to = 0, group_from = 0;

  [[gnu::always_inline]] int64_t unit() const { return dtype == Dtype::f32 || group_to ? lanes : 2 * lanes; }
  [[gnu::always_inline]] int64_t units() const { return (channels + unit() - 1) / unit(); }
  [[gnu::always_inline]] int64_t first(int64_t index) const {
    return (index + 1) * unit() <= channels ? index * unit() : channels - unit();
  }
  [[gnu::always_inline]] int64_t source_channels() const {
    return group_to ? channels / group_to * group_from : channels;
  }
  // The first source channel of a unit: its group's, or that of the first of its groups.
  [[gnu::always_inline]] int64_t source(int64_t index) const {
    return group_to >= lanes ? first(index) / group_to * group_from : first(index);
  }
  // Floats (or pairs of bf16) of the weights of one tap of a unit.
  [[gnu::always_inline]] int64_t tap_floats() const {
    return !group_to ? unit() : lanes * (dtype == Dtype::f32 ? group_from : group_from / 2);
  }
  // The place of a unit's channel among its floats: even channels of bf16 are the first vector, odd ones the second;
  // pairs are in the order that interleaving the pixels of two rows gives.
  [[gnu::always_inline]] int64_t place(int64_t channel) const {
    if (pair) return channel / 4 % 2 * lanes + channel / 8 * 4 + channel % 4;
    return dtype == Dtype::bf16 ? channel % 2 * lanes + channel / 2 : channel;
  }
};

// Whole rows of the result of a correlation: planes from first[0] on, rows from first[1] on.
struct DirectRows {
  DirectUnits units;
  const char* from;                        // pixel 0 of the image's channel 0
  char* to;
  const int64_t *from_stride, *to_stride;  // bytes, canonical axes
  const float* weights;                    // [unit][tap][place]
  int64_t taps, weight_tap[3];
  const LanePhase* phase[3];
  int64_t phases[3];
  int64_t source_size[3];
  int64_t first_unit, unit_count;
  int64_t first[2], extent[2], width;
  bool stream;  // units are whole lines of the caches and written around them
  char* row;    // where rows whose units are not are put together, to be written around the caches as one; or null
};

// The products of a box of pixels of plane z of dy with the inputs they reach, added to `sums`.
struct DirectWeightGrad {
  DirectUnits units;
  const Geometry* geo;
  const char *x, *dy;                     // pixel 0 of the image's channel 0
  const int64_t *x_stride, *dy_stride;
  int64_t first_unit, unit_count;
  int64_t z, first, rows, first_pixel, pixels;
  int64_t full_rows;                      // of a box that is not the last of its plane
  bool bias;                              // sums of dy too
  float* sums;                            // [unit][tap, then bias][place]; groups: [unit][output channel][tap][lane]
  // Of groups that fill a vector: room for copies of their pixels, and how many bytes away those
  // of the next box are.
  char* gathered;
  int64_t x_ahead, dy_ahead;
  void* fetcher;                          // the kernel's own: what is gathered next
};

// The units of a problem that these kernels serve, whatever its arrays' strides; false: the problem is not theirs.
bool direct_units(const Problem& problem, DirectUnits& units);
// Whether bf16 operands are multiplied in pairs by vdpbf16ps.
bool bf16_pairs(const Problem& problem);
// The distance of taps along y that the correlation of a problem takes in pairs, or 0.
int64_t direct_pair(const Problem& problem);
// The units of a problem with few channels per group; false: not served. The lanes of a weight gradient are inputs.
bool group_units(const Problem& problem, DirectUnits& units);
// Whether the channels of both tensors of a run lie together.
bool direct_fits(const DirectUnits& units, const Tensor& a, const Tensor& b);
// The weights of depthwise channels as [unit][tap][place]; with pairs, two bf16 in place of a float.
void pack_direct(const Geometry& geo, const DirectUnits& units, const Tensor& w, const ElementCode& code, float* packed,
                 int threads);

// The weights of groups as [unit][tap][source channel, or pair of them][lane]: those of one unit.
void pack_group_unit(const Problem& problem, const DirectUnits& units, const Tensor& w, const ElementCode& code,
                     int64_t index, float* packed);

CONVGRAD_PER_ISA(void correlate_direct(const DirectRows& job);
                 void weight_grad_direct(const DirectWeightGrad& job);)
// For units with pairs, and for groups of f32 and of bf16.
namespace avx512_bf16 {
void correlate_direct(const DirectRows& job);
void correlate_groups(const DirectRows& job);
void weight_grad_groups(const DirectWeightGrad& job);
}
namespace avx512 {
void correlate_groups(const DirectRows& job);
void weight_grad_groups(const DirectWeightGrad& job);
}

}  // namespace convgrad
