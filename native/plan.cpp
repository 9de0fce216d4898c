// Choosing a plan: every family of the registry is asked, the cheapest estimate wins, every answer is printable.
#include <cstdio>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <stdexcept>

#include "conv.h"
#include "threads.h"

namespace convgrad {
namespace {

bool is_empty(const Geometry& geo, unsigned wrt) {
  if ((wrt & wrt_weight) && (wrt & wrt_bias)) return geo.K == 0;
  const int64_t result = wrt & wrt_output  ? geo.N * geo.K * geo.out_pixels()
                         : wrt & wrt_input ? geo.N * geo.C * geo.in_pixels()
                         : wrt & wrt_weight ? geo.K * geo.group_in() * geo.taps()
                                            : geo.K;
  return result == 0;
}

// A sum of nothing: the batch, the summed channels or the output pixels are empty.
bool is_zero(const Geometry& geo, unsigned wrt) {
  if (wrt & wrt_output) return geo.group_in() == 0 || geo.in_pixels() == 0;
  if (wrt & wrt_input) return geo.group_out() == 0 || geo.out_pixels() == 0;
  return geo.N == 0 || geo.out_pixels() == 0 || ((wrt & wrt_weight) && geo.in_pixels() == 0 && !(wrt & wrt_bias));
}

Plan plan_zeros(const Problem& problem) {
  Plan plan;
  plan.kernel = "zeros";
  plan.threads = problem.threads;
  plan.notes.push_back("nothing to sum: zeros");
  plan.run = [problem](const Arguments& arguments) {
    const Geometry& geo = problem.geo;
    const int64_t x[5] = {geo.N, geo.C, geo.in[0], geo.in[1], geo.in[2]};
    const int64_t y[5] = {geo.N, geo.K, geo.out[0], geo.out[1], geo.out[2]};
    const int64_t w[5] = {geo.K, geo.group_in(), geo.kernel[0], geo.kernel[1], geo.kernel[2]};
    const int64_t db[5] = {geo.K, 1, 1, 1, 1};
    if (problem.wrt & wrt_output) write_zeros(arguments.y, y, problem.out_dtype, arguments.threads);
    if (problem.wrt & wrt_input) write_zeros(arguments.x, x, problem.out_dtype, arguments.threads);
    if (problem.wrt & wrt_weight) write_zeros(arguments.w, w, problem.out_dtype, arguments.threads);
    if (problem.wrt & wrt_bias) write_zeros(arguments.db, db, problem.out_dtype, arguments.threads);
  };
  return plan;
}

}  // namespace

void write_zeros(const Tensor& tensor, const int64_t (&extent)[5], Dtype dtype, int threads) {
  // Axes from the widest stride to the narrowest; the innermost ones that touch each other become one run of bytes.
  int order[5] = {0, 1, 2, 3, 4};
  auto wider = [&](int a, int b) {
    const int64_t sa = extent[a] == 1 ? INT64_MAX : std::llabs(tensor.stride[a]);
    const int64_t sb = extent[b] == 1 ? INT64_MAX : std::llabs(tensor.stride[b]);
    return sa > sb;
  };
  for (int i = 1; i < 5; ++i)
    for (int j = i; j > 0 && wider(order[j], order[j - 1]); --j) std::swap(order[j], order[j - 1]);
  int64_t run = size_of(dtype);
  int outer = 5;
  while (outer > 0 && (tensor.stride[order[outer - 1]] == run || extent[order[outer - 1]] == 1)) {
    if (extent[order[outer - 1]] == 0) return;
    run *= extent[order[--outer]];
  }
  int64_t runs = 1;
  for (int i = 0; i < outer; ++i) runs *= extent[order[i]];
  const int64_t per_task = std::max<int64_t>(1, (256 << 10) / run);
  const int64_t pieces = runs == 1 ? std::max<int64_t>(1, run >> 18) : 1;  // one long run is cut
  parallel_for((runs + per_task - 1) / per_task * pieces, threads, [&](int64_t task, int) {
    const int64_t piece = task % pieces, first = task / pieces * per_task;
    for (int64_t i = first; i < std::min(runs, first + per_task); ++i) {
      char* at = tensor.data;
      for (int64_t rest = i, axis = outer - 1; axis >= 0; --axis) {
        at += rest % extent[order[axis]] * tensor.stride[order[axis]];
        rest /= extent[order[axis]];
      }
      std::memset(at + run * piece / pieces, 0, size_t(run * (piece + 1) / pieces - run * piece / pieces));
    }
  });
}

Plan choose_plan(const Problem& problem) {
  if (is_empty(problem.geo, problem.wrt) || is_zero(problem.geo, problem.wrt)) return plan_zeros(problem);
  struct Family {
    const char* name;
    Planner plan;
  };
  static constexpr Family families[] = {
#define CONVGRAD_FAMILY(name, planner) {#name, planner},
#include "kernels.inc"
#undef CONVGRAD_FAMILY
  };
  // For tests and comparisons: a family that is taken whenever it can serve the problem.
  const char* preferred = std::getenv("CONVGRAD_FAMILY");
  // NOTE: families are compared for one thread: the choice decides the order of sums, which must not depend on threads.
  Problem alone = problem;
  alone.threads = 1;
  std::optional<Plan> best;
  Planner winner = nullptr;
  std::string reasons;
  std::vector<std::string> asked;
  const bool plain = problem.wrt != wrt_bias && beyond_planning(problem);
  for (const Family& family : families) {
    std::string why_not;
    if (plain && family.plan != plan_plain) continue;
    std::optional<Plan> plan = family.plan(alone, why_not);
    if (!plan) {
      reasons += std::string(reasons.empty() ? "" : "; ") + family.name + " " + why_not;
      continue;
    }
    char text[120];
    std::snprintf(text, sizeof text, "%s: %s, %.4g ms estimated on one thread", family.name, plan->kernel.c_str(),
                  plan->seconds * 1e3);
    asked.push_back(text);
    if (preferred && !std::strcmp(preferred, family.name)) plan->seconds = 0;
    if (!best || plan->doubt * plan->seconds < best->seconds) {
      best = std::move(plan);
      winner = family.plan;
    }
  }
  if (!best) throw std::runtime_error(reasons);
  if (problem.threads > 1) {
    std::string why_not;
    if (std::optional<Plan> shared = winner(problem, why_not)) best = std::move(shared);
  }
  if (best->threads <= 0) best->threads = problem.threads;
  best->notes.insert(best->notes.begin(), asked.begin(), asked.end());
  return std::move(*best);
}

}  // namespace convgrad
