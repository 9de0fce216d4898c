// How a grouped problem is cut for the lane kernels: which group of which image is in which lane, boxes of pixels.
#pragma once

#include "direct.h"
#include "lanes.h"
#include "line.h"

namespace convgrad {

// Groups (of one image, or of several images where there are fewer groups than lanes) spread over vectors.
struct LaneSpread {
  int lanes;              // of a vector
  int64_t images;         // per vector
  int64_t weight_blocks;  // vectors that cover the groups of one image
  int64_t image_blocks;   // sets of images that share the weights in lane form

  LaneSpread(const Geometry& geo, int lanes);

  // The planes of `tensor` in `blocks` weight blocks from the first one on; `channels` per group.
  LanePlanes planes(const Geometry& geo, const Tensor& tensor, int64_t channels, const ElementCode& code,
                    int64_t image_block, int64_t weight_block, int64_t blocks) const;
  // The group in a lane of a weight block, or -1 where the lane is empty.
  int64_t group_of(const Geometry& geo, int64_t weight_block, int lane) const;
};

// The extents of the boxes into which the pixels of a result (or of dy) are cut.
struct BoxCut {
  int64_t extent[3], count[3];
  int64_t boxes() const { return count[0] * count[1] * count[2]; }
  PixelBox box(int64_t index, const int64_t* size) const;
};

// What a correlation (forward or input gradient) reads and writes, axis by axis.
struct LaneWay {
  const Geometry* geo;
  bool input;  // the input gradient: dy -> dx; otherwise x -> y
  const int64_t* from_size() const { return input ? geo->out : geo->in; }
  const int64_t* to_size() const { return input ? geo->in : geo->out; }
  int64_t from_channels() const { return input ? geo->group_out() : geo->group_in(); }
  int64_t to_channels() const { return input ? geo->group_in() : geo->group_out(); }
  // The phases of one axis: the residues of the stride that there are for an input gradient, else one.
  std::vector<LanePhase> phases(int axis) const;
  static constexpr int64_t most_phases = 4096;  // of an axis; beyond that the family refuses
  bool too_many_phases() const {
    return std::max({phase_count(0), phase_count(1), phase_count(2)}) > most_phases;
  }
  int64_t phase_count(int axis) const {
    return input ? std::max<int64_t>(1, std::min(geo->stride[axis], geo->in[axis])) : 1;
  }
  // The source pixels that a box of destination pixels reads, clipped to the tensor on z and y (on x padding is kept).
  PixelBox source(const PixelBox& to) const;
  // Upper bound of the extent of `source` along an axis for a box of `extent`.
  int64_t source_extent(int axis, int64_t extent) const;
};

// The inputs that a box of output gradients reaches.
PixelBox input_box(const Geometry& geo, const PixelBox& dy);

ElementCode operand_code(const Problem& problem);
ElementCode result_code(const Problem& problem);

struct LaneKernels {
  decltype(&generic::load_lanes) load;
  decltype(&generic::correlate_lanes) correlate;
  decltype(&generic::weight_grad_lanes) weight_grad;
  decltype(&generic::finite_lanes) finite;
  decltype(&generic::sum_lanes) sum;
  decltype(&generic::correlate_lines) lines;
  decltype(&generic::weight_grad_lines) line_weight;
  decltype(&generic::correlate_direct) direct;
  decltype(&generic::weight_grad_direct) direct_weight;
  explicit LaneKernels(int level);
};

// All taps of one pair of channels, whose first weight is at `at`, from and to a dense line; T is float or double.
template <typename T>
void read_taps(const Geometry& geo, const Tensor& w, const char* at, const ElementCode& code, T* line);
template <typename T>
void write_taps(const Geometry& geo, const Tensor& w, char* at, const ElementCode& code, const T* line);
// The share of (output, tap) pairs on z and y that land in the input: the others are not visited.
double landing_share(const Geometry& geo);
// Cycles to bring all weights into lane form, or out of it.
double lane_weight_cycles(const Geometry& geo);

// Reads the weights into lane form, [weight block][group_out][group_in][taps][lane]; finite[block] says whether all of
// a block's weights are finite.
void pack_lane_weights(const Geometry& geo, const LaneSpread& spread, const Tensor& w, const ElementCode& code,
                       void* packed, bool* finite, int threads);

// The cut of `size` whose boxes fit `limit_vectors` (as counted by `vectors`) with the least data held twice.
BoxCut choose_box(const int64_t* size, int64_t blocks, int64_t limit_vectors,
                  const std::function<int64_t(const int64_t*)>& vectors, double* least = nullptr);
// Boxes, and how many weight blocks are moved together: more of them read longer stretches of memory, but leave less of
// the cache to each. `vectors` counts what one block holds.
struct LaneCut {
  BoxCut boxes;
  int64_t together;
};
LaneCut choose_lane_cut(const Problem& problem, const LaneSpread& spread, const int64_t* stride, int64_t channels,
                        const int64_t* size, int64_t limit_vectors,
                        const std::function<int64_t(const int64_t*)>& vectors);
// Cycles to move one vector of a tensor with these nominal strides into or out of lane form.
double lane_move_cycles(const int64_t* stride, int64_t bytes, int64_t channels, const LaneSpread& spread);

std::optional<Plan> plan_grouped_weight(const Problem& problem, std::string& why_not);

// The level that the lane kernels of a machine's level were compiled for.
inline const char* compiled_level(int level) { return level >= 2 ? "avx512" : level == 1 ? "avx2" : "generic"; }

// Sets the plan's workspace, threads and estimate; false (and why) where not even one thread's share fits the limit.
bool fit_workspace(Plan& plan, const Problem& problem, int64_t shared, int64_t per_thread, double cycles,
                   std::string& why_not);

// NOTE: a constant, the second-level cache of Zen 4: boxes and chunks, and so the bits of a weight gradient, must not
// depend on the machine.
inline constexpr int64_t l2_bytes = 1 << 20;

inline int64_t up_to_multiple(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
inline int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

}  // namespace convgrad
