// Few-channel weight gradients of bf16 by vdpbf16ps: two neighbouring pixels of dy meet two of x in one product.
//
// dy is [block][z][y][pair][lane]: a lane holds its channel of pixels 2i and 2i + 1 of a row. Where eight channels or
// fewer leave half of the lanes free, those hold the same channels one pixel later, and so the products of another tap:
// dy[p - 1] meets at x[p*stride + s] what tap s + stride wants. A "column" of taps is one tap, or two that share so.
//
// What two neighbouring outputs read through one tap lies side by side, in one 32-bit word. Pixels side by side become
// [channel][z][y][residue][place], by their residue of the stride; a word may begin at any place. Channels side by side
// become [z][y][pixel][channel] of words, of a pixel and the one a stride later.
#pragma once

#include "lanes.h"

namespace convgrad {

// Rows of bf16 pixels of one channel, or of one block of channels, of an image.
struct PairRows {
  const char* data;  // pixel 0 of the image's first channel
  const int64_t* stride;  // bytes, canonical axes
  const PixelBox* box;
  const int64_t* size;
};

namespace avx512_bf16 {
// These say whether every value is finite. Channels must lie together for the first; lanes are floats for the second.
bool pack_dy_pairs(const PairRows& rows, int64_t channels, bool shared, int64_t pairs, uint32_t* to);
bool pair_lanes(const float* lanes, int64_t rows, int64_t width, bool shared, int64_t pairs, uint32_t* to);
bool pack_x_places(const PairRows& rows, int64_t stride, int64_t places, uint16_t* to);
// Rows of `pixels` words of each channel; writes up to 15 words beyond.
bool pack_x_words(const PairRows& rows, int64_t channels, int64_t stride, int64_t pixels, uint32_t* to);
// `job` with given steps; finite where a stand-in for a pixel beside the tensors meets the other side.
void weight_grad_pairs(const LaneWeightGrad& job);
}

}  // namespace convgrad
