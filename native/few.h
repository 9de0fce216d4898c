// Convolutions whose groups have few input or few output channels: the many channels of the other side are the lanes.
//
// The side with few channels is a "plain" slab, one lane: its pixels are spread over the lanes of the many channels
// (broadcast), or it is the result, whose lanes are summed (reduce). Groups are separate problems.
#pragma once

#include "grouped.h"

namespace convgrad {

// Blocks [first, first + blocks) of the channels of one group of one image of `tensor`, a channel per lane.
LanePlanes channel_planes(const Tensor& tensor, int64_t image, int64_t first_channel, int64_t channels, int lanes,
                          int64_t first_block, int64_t blocks, const ElementCode& code);

// A box of `channels` channels, from `first_channel` on, as [channel][z][y][x]; pixels beside the tensor on x are zero.
void load_plain(const Tensor& tensor, int64_t image, int64_t first_channel, int64_t channels, const PixelBox& box,
                const int64_t* size, const ElementCode& code, void* slab);

// The same as [z][y][x][channel], for channels that lie together.
void load_together(const Tensor& tensor, int64_t image, int64_t first_channel, int64_t channels, const PixelBox& box,
                   const int64_t* size, const Isa& isa, const ElementCode& code, void* slab);

// What the lanes of a few-channel kernel stand for.
struct FewShape {
  int lanes;
  bool lanes_are_out;   // the many channels are output channels of the convolution
  int64_t many, few, blocks;  // channels per group on each side; vectors of the many
  FewShape(const Geometry& geo, int lanes, bool lanes_are_out)
      : lanes(lanes), lanes_are_out(lanes_are_out), many(lanes_are_out ? geo.group_out() : geo.group_in()),
        few(lanes_are_out ? geo.group_in() : geo.group_out()), blocks(divide_up(many, lanes)) {}
  // Where the weights of (group, many, few) start in the tensor.
  int64_t weight_offset(const Geometry& geo, const Tensor& w, int64_t group, int64_t m, int64_t f) const {
    const int64_t out = lanes_are_out ? m : f, in = lanes_are_out ? f : m;
    return (group * geo.group_out() + out) * w.stride[axis_o] + in * w.stride[axis_i];
  }
};

std::optional<Plan> plan_few_weight(const Problem& problem, std::string& why_not);

}  // namespace convgrad
