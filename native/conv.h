// The contract of the native core: what a problem is, what a kernel family gets, what a plan returns.
//
// Everything is 64-bit and byte-strided. Spatial axes are normalised to three (D H W), missing leading ones have
// extent 1, stride 1, dilation 1, pad 0. Per axis, output o, tap k and input i are linked by
//     i = o*stride + k*dilation - pad          (pad is the low side; the high side only shows in `out`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "isa.h"

namespace convgrad {

// What is asked for; a problem may ask for several (weight and bias in one pass).
enum Wrt : unsigned { wrt_output = 1, wrt_input = 2, wrt_weight = 4, wrt_bias = 8 };

// Indices of a tensor's axes in canonical order: activations N C D H W, weights O I D H W.
enum Axis { axis_n = 0, axis_c = 1, axis_d = 2, axis_h = 3, axis_w = 4, axis_o = 0, axis_i = 1 };

struct Geometry {
  int64_t N, C, K, G;  // batch, input channels, output channels, groups
  int64_t in[3], out[3], kernel[3], stride[3], dilation[3], pad[3];

  int64_t group_in() const { return C / G; }
  int64_t group_out() const { return K / G; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t in_pixels() const { return in[0] * in[1] * in[2]; }
  int64_t out_pixels() const { return out[0] * out[1] * out[2]; }
};

using Strides = int64_t[5];  // bytes, canonical order; may be negative or zero, need not be multiples of the element

// What a planner sees. The nominal strides are those of dense arrays in the asked layouts: a hint for choosing an
// orientation. The arrays that come with a run may have any other strides and must still give the right result.
struct Problem {
  Geometry geo;
  unsigned wrt;            // OR of Wrt
  Dtype dtype, out_dtype;  // of all operands, of all results
  Compute compute;         // rounding of the operands of products (never of a bias gradient)
  Strides x_nominal, w_nominal, y_nominal;
  int threads;              // as many as a run will use unless told otherwise: a hint, results must not depend on it
  int64_t max_workspace;    // bytes; a planner that cannot go that low refuses and says its minimum
  const Isa* isa;           // the instruction set to use, never test the CPU yourself
};

// One tensor of a run: x and y and w are read or written according to wrt (y is dy for the gradients).
struct Tensor {
  char* data = nullptr;
  Strides stride = {};
};

// What a run gets. `workspace` has the planned bytes and is aligned to 64. Scratch is indexed by the slot that
// parallel_for passes (0 <= slot < threads <= max_threads).
struct Arguments {
  Tensor x, w, y;
  Tensor db;  // stride[0] is the distance between two channels
  char* workspace = nullptr;
  int threads = 1;
};

inline constexpr int max_threads = 256;

struct Plan {
  std::string kernel;             // facts in a fixed order: gemm_bf16_f32_14x32_avx512_bf16
  int64_t workspace_bytes = 0;    // for the number of threads of the problem
  int threads = 0;                // the most threads that workspace is good for; 0: the problem's
  double seconds = 0;             // the cost model's estimate for one thread; the cheapest family wins
  double doubt = 1.25;            // how much longer it may take: an earlier family of the list is left only beyond that
  std::vector<std::string> notes; // the printable decision: cost model, tiles, chunks
  std::function<void(const Arguments&)> run;  // const, thread safe, writes every element of every asked result
};

// A family is one function: a plan, or nullopt and the reason (with the numbers) in `why_not`.
using Planner = std::optional<Plan> (*)(const Problem&, std::string& why_not);

// Declares every planner of the registry; see kernels.inc.
#define CONVGRAD_FAMILY(name, planner) std::optional<Plan> planner(const Problem&, std::string& why_not);
#include "kernels.inc"
#undef CONVGRAD_FAMILY

// Whether a problem has more taps or phases than planners may make lists of: only the plain family serves it (and a bias
// gradient alone has none). Planning takes milliseconds and megabytes, whatever is asked.
bool beyond_planning(const Problem& problem);

// Asks every family of the registry, keeps the cheapest plan; throws std::runtime_error with all reasons if none.
Plan choose_plan(const Problem& problem);

// Number of bytes of an element.
inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : dtype == Dtype::bf16 || dtype == Dtype::f16 ? 2 : 1;
}

// Writes +0 to every element of a result of these extents (canonical order).
void write_zeros(const Tensor& tensor, const int64_t (&extent)[5], Dtype dtype, int threads);

}  // namespace convgrad
