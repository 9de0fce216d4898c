// What the direct depthwise kernels serve, and their weights; see direct.h.
#include "direct.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "dense_prefetch.h"
#include "gemm.h"
#include "grouped.h"
#include "threads.h"

namespace convgrad {

bool direct_units(const Problem& problem, DirectUnits& units) {
  const Geometry& geo = problem.geo;
  const bool vectors = problem.dtype == Dtype::f32 || problem.dtype == Dtype::bf16 ||
                       (problem.dtype == Dtype::f16 && problem.isa->level >= 1);
  units = {problem.dtype, problem.isa->vector_bytes / 4, geo.C};
  return vectors && geo.group_in() == 1 && geo.group_out() == 1 && geo.C >= units.unit() &&
         !problem.isa->rounding(problem.dtype, problem.compute);
}

bool direct_fits(const DirectUnits& units, const Tensor& a, const Tensor& b) {
  const int64_t bytes = size_of(units.dtype);
  return a.stride[axis_c] == bytes && b.stride[axis_c] == bytes;
}

bool bf16_pairs(const Problem& problem) {
  // NOTE: level 3 has a bf16 kernel only where vdpbf16ps is the fastest way to multiply bf16 (see isa.cpp).
  return problem.dtype == Dtype::bf16 && problem.isa->level == 3 && problem.isa->gemm->bf16 &&
         !problem.isa->rounding(problem.dtype, problem.compute);
}

int64_t direct_pair(const Problem& problem) {
  if (!bf16_pairs(problem) || problem.geo.kernel[1] < 2) return 0;
  const int64_t stride = problem.geo.stride[1];
  return problem.wrt == wrt_input ? stride / std::gcd(stride, problem.geo.dilation[1]) : 1;
}

void pack_direct(const Geometry& geo, const DirectUnits& units, const Tensor& w, const ElementCode& code, float* packed,
                 int threads) {
  const int64_t taps = geo.taps(), unit = units.unit(), R = geo.kernel[1], S = geo.kernel[2];
  parallel_for(units.units(), threads, [&](int64_t index, int) {
    std::vector<float> line(taps);
    for (int64_t c = 0; c < unit; ++c) {
      read_taps(geo, w, w.data + (units.first(index) + c) * w.stride[axis_o], code, line.data());
      float* to = packed + index * taps * unit + units.place(c);
      for (int64_t tap = 0; tap < taps; ++tap) {
        to[tap * unit] = line[tap];
        if (!units.pair) continue;
        // The taps are bf16: their bits are the upper halves of the floats.
        uint32_t first, second = 0;
        std::memcpy(&first, &line[tap], 4);
        if (tap / S % R + units.pair < R) std::memcpy(&second, &line[tap + units.pair * S], 4);
        first = first >> 16 | (second & 0xffff0000u);
        std::memcpy(to + tap * unit, &first, 4);
      }
    }
  });
}

// Whether a sole group has so few channels that its weights stay in the caches row after row.
// NOTE: measured on Zen 4: from 128 result channels on there was nothing to gain over the dense kernels.
static bool is_small(int64_t to, int64_t from, int64_t taps) {
  return to <= 64 && from >= 2 && from <= (taps == 1 ? 256 : 64);
}

bool group_units(const Problem& problem, DirectUnits& units) {
  const Geometry& geo = problem.geo;
  const bool input = problem.wrt != wrt_output, f32 = problem.dtype == Dtype::f32, weight = problem.wrt & wrt_weight;
  const bool pairs = bf16_pairs(problem);
  const int64_t to = input ? geo.group_in() : geo.group_out(), from = input ? geo.group_out() : geo.group_in();
  units = {problem.dtype, problem.isa->vector_bytes / 4, geo.G * to};
  units.group_to = to;
  units.group_from = from;
  const bool shared = to < units.lanes;  // several groups in a vector
  if (weight && (geo.G == 1 || problem.wrt & wrt_bias || from % 4)) return false;
  if (geo.G == 1 && !is_small(to, from, geo.taps())) return false;
  return problem.isa->level >= 2 && (f32 || pairs) && (weight || problem.dtype == problem.out_dtype) &&
         !problem.isa->rounding(problem.dtype, problem.compute) && units.channels % units.lanes == 0 &&
         (shared ? to == from && (to == 4 || to == 8) : to % units.lanes == 0 && (f32 || from % 2 == 0));
}

void pack_group_unit(const Problem& problem, const DirectUnits& units, const Tensor& w, const ElementCode& code,
                     int64_t index, float* packed) {
  const Geometry& geo = problem.geo;
  const int64_t taps = geo.taps(), L = units.lanes, step = units.tap_floats(), bytes = size_of(problem.dtype);
  const bool input = problem.wrt == wrt_input, pairs = problem.dtype != Dtype::f32;
  const int64_t words = pairs ? 2 : 1;  // channels in a word
  // The taps of neighbouring input channels follow each other: the lanes of an input gradient are read in one go.
  const bool dense = w.stride[axis_w] == bytes && w.stride[axis_h] == geo.kernel[2] * bytes &&
                     w.stride[axis_d] == geo.kernel[1] * geo.kernel[2] * bytes && w.stride[axis_i] == taps * bytes;
  // Or the input channels lie together: they are the lanes already.
  const int64_t tap_bytes = w.stride[axis_w];
  const bool together = input && units.group_to >= L && w.stride[axis_i] == bytes &&
                        w.stride[axis_h] == geo.kernel[2] * tap_bytes &&
                        w.stride[axis_d] == geo.kernel[1] * geo.kernel[2] * tap_bytes;
  std::vector<float> line(2 * L * taps);
  const int64_t group = index * L / units.group_to;
  // line[lane][tap] of one source channel of the unit's groups.
  const auto read = [&](int64_t c, float* lanes) {
    if (input && dense && units.group_to >= L) {
      const int64_t out = group * units.group_from + c, in = index * L % units.group_to;
      const char* at = w.data + out * w.stride[axis_o] + in * w.stride[axis_i];
      if (c + words < units.group_from)  // far away: the processor does not guess it
        for (int64_t i = 0; i < L * taps * bytes; i += 64) fetch_to_read(at + words * w.stride[axis_o] + i);
      return code.decode(at, bytes, L * taps, lanes);
    }
    for (int64_t lane = 0; lane < L; ++lane) {
      const int64_t to = index * L + lane, out = input ? to / units.group_to * units.group_from + c : to;
      const int64_t in = input ? to % units.group_to : c;
      const char* at = w.data + out * w.stride[axis_o] + in * w.stride[axis_i];
      if (dense) code.decode(at, bytes, taps, lanes + lane * taps);
      else read_taps(geo, w, at, code, lanes + lane * taps);
    }
  };
  const auto pair = [&](uint32_t* first, const uint32_t* second, int64_t n) {
    for (int64_t i = 0; i < n; ++i) first[i] = first[i] >> 16 | (second[i] & 0xffff0000u);
  };
  if (together) {  // a few taps at a time, which stay in the first-level cache
    constexpr int64_t some = 8;
    for (int64_t first = 0; first < taps; first += some)
      for (int64_t c = 0; c < units.group_from; c += words) {
        const char* at = w.data + (group * units.group_from + c) * w.stride[axis_o] +
                         index * L % units.group_to * bytes + first * tap_bytes;
        float* to = packed + (index * taps + first) * step + c / words * L;
        for (int64_t tap = first; tap < std::min(taps, first + some); ++tap, at += tap_bytes, to += step) {
          code.decode(at, bytes, L, to);
          if (!pairs) continue;
          code.decode(at + w.stride[axis_o], bytes, L, line.data());
          pair(reinterpret_cast<uint32_t*>(to), reinterpret_cast<const uint32_t*>(line.data()), L);
        }
      }
    return;
  }
  for (int64_t c = 0; c < units.group_from; c += words) {
    float* to = packed + index * taps * step + c / words * L;
    uint32_t* first = reinterpret_cast<uint32_t*>(line.data());  // bits of floats
    read(c, line.data());
    if (pairs) {
      read(c + 1, line.data() + L * taps);
      pair(first, first + L * taps, L * taps);
    }
    problem.isa->gemm->transpose32(first, taps, L, taps, reinterpret_cast<uint32_t*>(to), step);
  }
}

}  // namespace convgrad
