// Problems beyond all planning: one result element after the other, by the definition. A plan takes no memory and no time,
// whatever the kernel or the stride; the families with tiles make lists of all taps of an axis and of all phases.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "conv.h"
#include "threads.h"

namespace convgrad {
namespace {

constexpr int64_t most_axis_taps = 32768, most_phases = 32768;
constexpr int64_t line_length = 512, task_elements = 64;

int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// A sum in double with what its roundings lost.
class Total {
 public:
  void add(double term) {
    const double next = sum_ + term;
    lost_ += std::fabs(sum_) >= std::fabs(term) ? (sum_ - next) + term : (term - next) + sum_;
    sum_ = next;
  }
  double value() const { return std::isfinite(sum_) ? sum_ + lost_ : sum_; }

 private:
  double sum_ = 0, lost_ = 0;
};

// Indices first + m*step, m = 0 .. count - 1, of taps or outputs, and the other side's index of the first with its step.
struct Line {
  int64_t first, step, count, other, other_step;
};

class PlainRun {
 public:
  PlainRun(const Problem& problem, const Arguments& arguments)
      : problem_(problem), geo_(problem.geo), arguments_(arguments),
        round_(problem.isa->rounding(problem.dtype, problem.compute)) {}

  void run() const {
    const unsigned wrt = problem_.wrt;
    const int64_t extent[5] = {wrt == wrt_weight ? geo_.K : geo_.N,
                               wrt == wrt_weight ? geo_.group_in() : wrt == wrt_output ? geo_.K : geo_.C,
                               size()[0], size()[1], size()[2]};
    const Tensor& result = wrt == wrt_output ? arguments_.y : wrt == wrt_input ? arguments_.x : arguments_.w;
    const int64_t elements = extent[0] * extent[1] * extent[2] * extent[3] * extent[4];
    parallel_for((elements + task_elements - 1) / task_elements, arguments_.threads, [&](int64_t task, int) {
      for (int64_t i = task * task_elements; i < std::min(elements, (task + 1) * task_elements); ++i) {
        int64_t at[5];
        char* to = result.data;
        for (int64_t rest = i, axis = 4; axis >= 0; --axis) {
          at[axis] = rest % extent[axis];
          rest /= extent[axis];
          to += at[axis] * result.stride[axis];
        }
        const double value = element(at);
        problem_.isa->encode64[int(problem_.out_dtype)](&value, 1, to, 0);
      }
    });
  }

 private:
  const int64_t* size() const {
    return problem_.wrt == wrt_output ? geo_.out : problem_.wrt == wrt_input ? geo_.in : geo_.kernel;
  }

  // What one axis sums for position `at` of the result: taps with inputs, taps with outputs, or outputs with inputs.
  Line line_of(int axis, int64_t at) const {
    const int64_t s = geo_.stride[axis], d = geo_.dilation[axis], p = geo_.pad[axis];
    const auto clipped = [](int64_t first, int64_t per_step, int64_t size, int64_t most) {
      // m with 0 <= first + m*per_step < size and 0 <= m < most
      const int64_t low = first >= 0 ? 0 : -floor_divide(first, per_step);
      const int64_t high = first >= size ? 0 : floor_divide(size - 1 - first, per_step) + 1;
      return std::pair(low, std::max(low, std::min(high, most)));
    };
    if (problem_.wrt == wrt_output) {
      const auto [low, high] = clipped(at * s - p, d, geo_.in[axis], geo_.kernel[axis]);
      return {low, 1, high - low, at * s - p + low * d, d};
    }
    if (problem_.wrt == wrt_weight) {
      const auto [low, high] = clipped(at * d - p, s, geo_.in[axis], geo_.out[axis]);
      return {low, 1, high - low, at * d - p + low * s, s};
    }
    // Taps k with at + p - k*d divisible by s are s/common apart, their outputs d/common.
    const int64_t common = std::gcd(s, d), step = s / common, back = d / common;
    if ((at + p) % common) return {0, 1, 0, 0, 0};
    int64_t k = int64_t((__int128)((at + p) / common % step) * inverse(back % step, step) % step);
    int64_t o = (at + p - k * d) / s;
    if (o >= geo_.out[axis]) {
      const int64_t skipped = -floor_divide(-(o - geo_.out[axis] + 1), back);
      k += skipped * step;
      o -= skipped * back;
    }
    if (k >= geo_.kernel[axis] || o < 0) return {0, 1, 0, 0, 0};
    return {k, step, std::min((geo_.kernel[axis] - 1 - k) / step, o / back) + 1, o, -back};
  }

  // x with a*x = 1 modulo n.
  static int64_t inverse(int64_t a, int64_t n) {
    int64_t r0 = n, r1 = a, t0 = 0, t1 = 1;
    while (r1) {
      const int64_t q = r0 / r1;
      r0 -= q * r1;
      t0 -= q * t1;
      std::swap(r0, r1);
      std::swap(t0, t1);
    }
    return t0 < 0 ? t0 + n : t0;
  }

  double element(const int64_t (&at)[5]) const {
    const Tensor &x = arguments_.x, &w = arguments_.w, &y = arguments_.y;
    const unsigned wrt = problem_.wrt;
    const Line line[3] = {line_of(0, at[2]), line_of(1, at[3]), line_of(2, at[4])};
    const int64_t ins = geo_.group_in(), outs = geo_.group_out();
    // The two operands: `a` runs with a line's first index (weight or dy), `b` with its other one.
    const Tensor &a = wrt == wrt_weight ? y : w, &b = wrt == wrt_input ? y : x;
    const int64_t group = wrt == wrt_output ? at[1] / outs : wrt == wrt_input ? at[1] / ins : at[0] / outs;
    const int64_t terms = wrt == wrt_output ? ins : wrt == wrt_input ? outs : geo_.N;
    Total total;
    for (int64_t i = 0; i < terms; ++i) {
      const char *from_a = a.data, *from_b = b.data;
      if (wrt == wrt_output) {
        from_a += at[1] * w.stride[axis_o] + i * w.stride[axis_i];
        from_b += at[0] * x.stride[axis_n] + (group * ins + i) * x.stride[axis_c];
      } else if (wrt == wrt_input) {
        from_a += (group * outs + i) * w.stride[axis_o] + at[1] % ins * w.stride[axis_i];
        from_b += at[0] * y.stride[axis_n] + (group * outs + i) * y.stride[axis_c];
      } else {
        from_a += i * y.stride[axis_n] + at[0] * y.stride[axis_c];
        from_b += i * x.stride[axis_n] + (group * ins + at[1]) * x.stride[axis_c];
      }
      for (int64_t d = 0; d < line[0].count; ++d)
        for (int64_t h = 0; h < line[1].count; ++h) {
          const char *row_a = from_a, *row_b = from_b;
          const int64_t m[3] = {d, h, 0};
          for (int axis = 0; axis < 3; ++axis) {
            row_a += (line[axis].first + m[axis] * line[axis].step) * a.stride[axis_d + axis];
            row_b += (line[axis].other + m[axis] * line[axis].other_step) * b.stride[axis_d + axis];
          }
          add_line(row_a, line[2].step * a.stride[axis_w], row_b, line[2].other_step * b.stride[axis_w], line[2].count,
                   total);
        }
    }
    return total.value();
  }

  void add_line(const char* a, int64_t a_step, const char* b, int64_t b_step, int64_t count, Total& total) const {
    if (problem_.dtype == Dtype::f64) return add_values<double>(a, a_step, b, b_step, count, total);
    add_values<float>(a, a_step, b, b_step, count, total);
  }
  template <typename Value>
  void add_values(const char* a, int64_t a_step, const char* b, int64_t b_step, int64_t count, Total& total) const {
    Value first[line_length], second[line_length];
    for (int64_t done = 0; done < count; done += line_length) {
      const int64_t n = std::min(line_length, count - done);
      read(a + done * a_step, a_step, n, first);
      read(b + done * b_step, b_step, n, second);
      for (int64_t i = 0; i < n; ++i) total.add(double(first[i]) * double(second[i]));
    }
  }
  void read(const char* from, int64_t step, int64_t n, double* to) const { problem_.isa->decode64(from, step, n, to); }
  void read(const char* from, int64_t step, int64_t n, float* to) const {
    problem_.isa->decode[int(problem_.dtype)](from, step, n, to);
    if (round_) round_(to, n);
  }

  const Problem& problem_;
  const Geometry& geo_;
  const Arguments& arguments_;
  const RoundLine round_;
};

}  // namespace

bool beyond_planning(const Problem& problem) {
  const Geometry& geo = problem.geo;
  int64_t phases = 1;
  for (int axis = 0; axis < 3; ++axis) {
    if (geo.kernel[axis] > most_axis_taps) return true;
    if (problem.wrt == wrt_input) phases *= std::min({geo.stride[axis], geo.in[axis], geo.kernel[axis]});
  }
  return phases > most_phases;
}

std::optional<Plan> plan_plain(const Problem& problem, std::string& why_not) {
  if (problem.wrt != wrt_output && problem.wrt != wrt_input && problem.wrt != wrt_weight) {
    why_not = "this combination of results is served one by one";
    return std::nullopt;
  }
  if (!beyond_planning(problem)) {
    why_not = "serves what the other families cannot plan: kernels of more than " + std::to_string(most_axis_taps) +
              " taps along an axis, more than " + std::to_string(most_phases) + " phases of an input gradient";
    return std::nullopt;
  }
  Plan plan;
  plan.kernel = "plain_f64_generic";
  plan.threads = problem.threads;
  plan.seconds = 1;
  plan.notes.push_back("one element after the other: too many taps or phases to plan tiles");
  plan.run = [problem](const Arguments& arguments) { PlainRun(problem, arguments).run(); };
  return plan;
}

}  // namespace convgrad
