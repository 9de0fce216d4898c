// The dense family: implicit GEMM for the forward and both gradients, any geometry, layout and number format.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "dense_correlate.h"
#include "dense_weight.h"

namespace convgrad {
namespace {

constexpr double cycles_per_second = 3.6e9;  // Zen 4, where the cost model was measured
constexpr double small_cycles = 60e3;      // below this a second thread costs more than it brings

enum class Element { f32, f64, bf16 };

// bf16 operands are packed as bf16 where a bf16 kernel exists and no bit is lost by it.
Element packed_element(const Problem& problem) {
  if (problem.dtype == Dtype::f64) return Element::f64;
  const bool narrow = problem.dtype == Dtype::bf16 || problem.dtype == Dtype::e4m3 || problem.dtype == Dtype::e5m2 ||
                      problem.dtype == Dtype::hif8 || problem.compute == Compute::bf16;
  return narrow && problem.isa->gemm->bf16 ? Element::bf16 : Element::f32;
}

const Gemm* kernel_of(const Problem& problem, Element element) {
  return element == Element::f64    ? problem.isa->gemm->f64
         : element == Element::bf16 ? problem.isa->gemm->bf16
                                    : problem.isa->gemm->f32;
}

// The number of slots that fit under the limit, and the plan's fields that follow from it.
bool finish(Plan& plan, const Problem& problem, const Gemm* gemm, int64_t shared, int64_t slot, double cycles) {
  plan.kernel = std::string("gemm_") + gemm->name;
  plan.threads = cycles < small_cycles ? 1 : problem.threads;
  plan.threads = int(std::min<int64_t>(plan.threads, (problem.max_workspace - shared) / std::max<int64_t>(slot, 1)));
  plan.workspace_bytes = shared + plan.threads * slot;
  plan.seconds = cycles / cycles_per_second;
  char text[160];
  std::snprintf(text, sizeof text, "%.3g Mcycles estimated, %lld KiB shared + %lld KiB for each of %d threads",
                cycles * 1e-6, (long long)(shared >> 10), (long long)(slot >> 10), plan.threads);
  plan.notes.push_back(text);
  return plan.threads > 0;
}

std::string too_little(int64_t minimum, const Problem& problem) {
  return "needs at least " + std::to_string(minimum) + " bytes of workspace, max_workspace_bytes=" +
         std::to_string(problem.max_workspace);
}

std::optional<Plan> plan_correlation(const Problem& problem, std::string& why_not) {
  const Element element = packed_element(problem);
  auto correlation = std::make_shared<Correlation>(problem, kernel_of(problem, element));
  Plan plan;
  double cycles = 0;
  int64_t minimum = 0;
  if (correlation->phases.empty()) {
    correlation->zeros_first = true;
    plan.kernel = "zeros";
    plan.threads = problem.threads;
    plan.notes.push_back("no tap lands: zeros");
  } else {
    const int64_t bytes = element == Element::f64 ? 8 : element == Element::bf16 ? 2 : 4;
    cycles = correlation->choose_blocking(bytes, problem.max_workspace, minimum);
    if (cycles < 0 || !finish(plan, problem, correlation->gemm, correlation->weight_bytes, correlation->slot_bytes, cycles)) {
      why_not = too_little(minimum, problem);
      return std::nullopt;
    }
    plan.notes.push_back(correlation->describe());
  }
  switch (element) {
    case Element::f64: plan.run = [correlation](const Arguments& a) { run_correlation<double>(*correlation, a); }; break;
    case Element::bf16: plan.run = [correlation](const Arguments& a) { run_correlation<Bf16>(*correlation, a); }; break;
    default: plan.run = [correlation](const Arguments& a) { run_correlation<float>(*correlation, a); };
  }
  return plan;
}

std::optional<Plan> plan_weight_gradient(const Problem& problem, std::string& why_not) {
  const Element element = packed_element(problem);
  auto gradient = std::make_shared<WeightGradient>(problem, kernel_of(problem, element));
  const int64_t bytes = element == Element::f64 ? 8 : element == Element::bf16 ? 2 : 4;
  int64_t minimum = 0;
  const double cycles = gradient->choose_blocking(bytes, problem.max_workspace, minimum);
  Plan plan;
  if (cycles < 0 || !finish(plan, problem, gradient->gemm, gradient->partial_bytes + gradient->bias_bytes,
                            gradient->slot_bytes, cycles)) {
    why_not = too_little(minimum, problem);
    return std::nullopt;
  }
  plan.notes.push_back(gradient->describe());
  switch (element) {
    case Element::f64: plan.run = [gradient](const Arguments& a) { run_weight_gradient<double>(*gradient, a); }; break;
    case Element::bf16: plan.run = [gradient](const Arguments& a) { run_weight_gradient<Bf16>(*gradient, a); }; break;
    default: plan.run = [gradient](const Arguments& a) { run_weight_gradient<float>(*gradient, a); };
  }
  return plan;
}

}  // namespace

std::optional<Plan> plan_dense(const Problem& problem, std::string& why_not) {
  if (problem.wrt == wrt_output || problem.wrt == wrt_input) return plan_correlation(problem, why_not);
  if (problem.geo.group_in() == 0) {
    why_not = "has no weight to compute: in_channels=0";
    return std::nullopt;
  }
  if (problem.wrt == wrt_weight || problem.wrt == (wrt_weight | wrt_bias)) return plan_weight_gradient(problem, why_not);
  why_not = "computes the output, the input gradient, or the weight gradient with or without the bias gradient";
  return std::nullopt;
}

}  // namespace convgrad
