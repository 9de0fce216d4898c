// The dense family: implicit GEMM for the forward and both gradients, any geometry, layout and number format.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "dense_correlate.h"
#include "dense_paired.h"
#include "dense_weight.h"
#include "dense_windows.h"

namespace convgrad {
namespace {

constexpr double cycles_per_second = 3.6e9;  // Zen 4, where the cost model was measured
constexpr double parts_gain = 0.5;         // an f32 FMA is twice as fast on processors with AMX as the model says
constexpr double small_cycles = 60e3;      // below this a second thread costs more than it brings

enum class Element { f32, f64, bf16, parts };

// What CONVGRAD_PARTS says: 1 takes parts wherever they are possible, 0 never; nothing: where they pay.
const char* parts_choice() {
  const char* choice = std::getenv("CONVGRAD_PARTS");
  return choice && *choice ? choice : nullptr;
}

// 11 bits of f16, 12 of hf32 are two parts, 24 of f32 are three.
bool two_parts(const Problem& problem) { return problem.dtype == Dtype::f16 || problem.compute != Compute::f32; }

// NOTE: measured on a Xeon with AMX, two cores, beside f32 FMAs: parts are 1.1 to 1.5 times as fast in input gradients
// where the weight in three parts stays in L2 and a packed element is used often (resnet50_l1_3x3_64, c3d_conv2_64_128,
// wan21_vae_96_full); they are slower in weight gradients, with strides, 1x1 kernels or more channels.
// Two parts pay more often: 1.1 to 2.1 times as fast with any stride, unless there are few pixels for the weight; and
// 1.2 to 1.5 times in weight gradients with many uses of an element (resnet50_l3_3x3_256, wan21_vae_96_full). Beside a
// busy neighbour on the core FMAs lose less than tiles do: where parts gain little, they are not taken.
bool parts_pay(const Problem& problem) {
  constexpr int64_t most_weights = 270'000, fewest_pixels = 700;
  if (const char* choice = parts_choice()) return *choice != '0';
  const Geometry& geo = problem.geo;
  const bool forward = problem.wrt & wrt_output, two = two_parts(problem);
  if (problem.wrt & (wrt_weight | wrt_bias))
    return two && std::min(geo.group_in(), geo.group_out()) * geo.taps() >= 1600;
  const int64_t uses = (forward ? geo.group_out() : geo.group_in()) * geo.taps();
  if (uses < (two ? 250 : 300)) return false;
  if (two) return geo.N * (forward ? geo.in_pixels() : geo.out_pixels()) >= fewest_pixels;
  return geo.stride[0] == 1 && geo.stride[1] == 1 && geo.stride[2] == 1 &&
         geo.K * geo.group_in() * geo.taps() <= most_weights;
}

// How an operand is packed: bf16 operands as bf16 where a bf16 kernel exists and no bit is lost by it, wider ones in
// two or three bf16 parts where that is faster than f32.
Element packed_element(const Problem& problem) {
  if (problem.dtype == Dtype::f64) return Element::f64;
  const bool narrow = problem.dtype == Dtype::bf16 || problem.dtype == Dtype::e4m3 || problem.dtype == Dtype::e5m2 ||
                      problem.dtype == Dtype::hif8 || problem.compute == Compute::bf16;
  if (narrow) return problem.isa->gemm->bf16 ? Element::bf16 : Element::f32;
  return problem.isa->gemm->bf16x3 && parts_pay(problem) ? Element::parts : Element::f32;
}

const Gemm* kernel_of(const Problem& problem, Element element) {
  const GemmKernels& kernels = *problem.isa->gemm;
  switch (element) {
    case Element::f64: return kernels.f64;
    case Element::bf16: return kernels.bf16;
    case Element::parts: return two_parts(problem) ? kernels.bf16x2 : kernels.bf16x3;
    default: return kernels.f32;
  }
}

int64_t bytes_of(Element element) { return element == Element::f64 ? 8 : element == Element::f32 ? 4 : 2; }

// A plan for one packed element, with a run that tells whether the element was good enough for the operands.
struct Way {
  Plan plan;
  std::function<bool(const Arguments&)> run;
};

// Between the slots of a few threads. The sums of one tap lie far behind those of the tap before, the processor fetches
// some such steps ahead, to write, and so took lines of the next slot from the thread that was working there.
constexpr int64_t slots_apart = 1 << 20;
constexpr int few_threads = 16;

// The number of slots that fit under the limit, apart if possible, and the plan's fields that follow from it.
bool finish(Plan& plan, const Problem& problem, const Gemm* gemm, int64_t shared, int64_t& slot, double cycles) {
  plan.kernel = std::string("gemm_") + gemm->name;
  plan.threads = cycles < small_cycles ? 1 : problem.threads;
  const int64_t room = problem.max_workspace - shared;
  plan.threads = int(std::min<int64_t>(plan.threads, room / std::max<int64_t>(slot, 1)));
  if (plan.threads > 1 && plan.threads <= few_threads && room / plan.threads - slot >= slots_apart) slot += slots_apart;
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

std::optional<Way> correlate_with(const Problem& problem, Element element, std::string& why_not) {
  auto correlation = std::make_shared<Correlation>(problem, kernel_of(problem, element));
  Way way;
  Plan& plan = way.plan;
  double cycles = 0;
  int64_t minimum = 0;
  if (correlation->phases.empty()) {
    correlation->zeros_first = true;
    plan.kernel = "zeros";
    plan.threads = problem.threads;
    plan.notes.push_back("no tap lands: zeros");
  } else {
    cycles = correlation->choose_blocking(bytes_of(element), problem.max_workspace, minimum);
    Correlation& c = *correlation;
    if (cycles < 0 || !finish(plan, problem, c.gemm, c.weight_bytes, c.slot_bytes, cycles)) {
      why_not = too_little(minimum, problem);
      return std::nullopt;
    }
    plan.notes.push_back(correlation->describe());
  }
  switch (element) {
    case Element::f64: way.run = [=](const Arguments& a) { return run_correlation<double>(*correlation, a); }; break;
    case Element::f32: way.run = [=](const Arguments& a) { return run_correlation<float>(*correlation, a); }; break;
    default: way.run = [=](const Arguments& a) { return run_correlation<Bf16>(*correlation, a); };
  }
  return way;
}

// The weight gradient from whole windows, where that is expected to take fewer cycles than `others`.
std::optional<Way> sum_windows_with(const Problem& problem, Element element, double others) {
  auto gradient = std::make_shared<WindowGradient>(problem, kernel_of(problem, element));
  const double cycles = gradient->choose_blocking(bytes_of(element), problem.max_workspace);
  Way way;
  if (cycles < 0 || 1.03 * cycles >= others) return std::nullopt;
  if (!finish(way.plan, problem, gradient->gemm, 0, gradient->slot_bytes, cycles)) return std::nullopt;
  way.plan.notes.push_back(gradient->describe());
  way.run = [=](const Arguments& a) {
    switch (element) {
      case Element::f64: run_window_gradient<double>(*gradient, a); break;
      case Element::f32: run_window_gradient<float>(*gradient, a); break;
      default: run_window_gradient<Bf16>(*gradient, a);
    }
    return true;
  };
  return way;
}

std::optional<Way> sum_weights_with(const Problem& problem, Element element, std::string& why_not) {
  auto gradient = std::make_shared<WeightGradient>(problem, kernel_of(problem, element));
  int64_t minimum = 0;
  const double cycles = gradient->choose_blocking(bytes_of(element), problem.max_workspace, minimum);
  if (std::optional<Way> windows = sum_windows_with(problem, element, cycles)) return windows;
  Way way;
  if (cycles < 0 || !finish(way.plan, problem, gradient->gemm, gradient->partial_bytes + gradient->bias_bytes,
                            gradient->slot_bytes, cycles)) {
    why_not = too_little(minimum, problem);
    return std::nullopt;
  }
  way.plan.notes.push_back(gradient->describe());
  switch (element) {
    case Element::f64: way.run = [=](const Arguments& a) { return run_weight_gradient<double>(*gradient, a); }; break;
    case Element::f32: way.run = [=](const Arguments& a) { return run_weight_gradient<float>(*gradient, a); }; break;
    default: way.run = [=](const Arguments& a) { return run_weight_gradient<Bf16>(*gradient, a); };
  }
  return way;
}

std::optional<Way> pair_weights_with(const Problem& problem, Element element) {
  auto gradient = std::make_shared<PairedGradient>(problem, kernel_of(problem, element));
  const double cycles = gradient->choose_blocking(problem.max_workspace);
  Way way;
  if (cycles < 0 || !finish(way.plan, problem, gradient->gemm, gradient->partial_bytes + gradient->bias_bytes,
                            gradient->slot_bytes, cycles))
    return std::nullopt;
  way.plan.notes.push_back(gradient->describe());
  way.run = [=](const Arguments& a) { return run_paired_gradient(*gradient, a); };
  return way;
}

// The best element's way. Operands in parts come with a second way in f32, for values that the parts cannot hold (Inf,
// NaN, very small ones): it computes everything once more.
std::optional<Plan> plan_elements(const Problem& problem, std::string& why_not,
                                  std::optional<Way> (*make)(const Problem&, Element, std::string&)) {
  const Element element = packed_element(problem);
  const bool tiles = element != Element::f64 && kernel_of(problem, element)->near_k > 0;
  const bool paired = tiles && problem.wrt & wrt_weight;
  std::optional<Way> way = paired ? pair_weights_with(problem, element) : make(problem, element, why_not);
  if (paired || element == Element::parts) {
    const std::optional<Way> spare = make(problem, element == Element::parts ? Element::f32 : element, why_not);
    if (!spare) return std::nullopt;
    const bool slower = element == Element::parts && way && way->plan.seconds > parts_gain * spare->plan.seconds;
    if (!way || (slower && !parts_choice())) {
      way = spare;
    } else {
      Plan& plan = way->plan;
      plan.threads = std::min(plan.threads, spare->plan.threads);
      plan.workspace_bytes = std::max(plan.workspace_bytes, spare->plan.workspace_bytes);
      plan.notes.push_back("for NaN, and values that parts cannot hold: " + spare->plan.kernel);
      plan.run = [first = way->run, second = spare->run](const Arguments& a) {
        if (!first(a)) second(a);
      };
      return plan;
    }
  }
  if (!way) return std::nullopt;
  way->plan.run = [run = way->run](const Arguments& a) { run(a); };
  return way->plan;
}

}  // namespace

std::optional<Plan> plan_dense(const Problem& problem, std::string& why_not) {
  if (problem.wrt == wrt_output || problem.wrt == wrt_input) return plan_elements(problem, why_not, correlate_with);
  if (problem.geo.group_in() == 0) {
    why_not = "has no weight to compute: in_channels=0";
    return std::nullopt;
  }
  if (problem.wrt == wrt_weight || problem.wrt == (wrt_weight | wrt_bias))
    return plan_elements(problem, why_not, sum_weights_with);
  why_not = "computes the output, the input gradient, or the weight gradient with or without the bias gradient";
  return std::nullopt;
}

}  // namespace convgrad
