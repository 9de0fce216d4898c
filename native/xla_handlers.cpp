#include "xla_handlers.h"

#ifdef CONVGRAD_XLA
#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "conv.h"
#include "gpu/prepared_call.h"
#include "plan_numbers.h"
#include "scratch.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace convgrad {
namespace {

namespace ffi = xla::ffi;

// XLA's threads. A call that its pool begins late must find nothing left to do, even after the loop has ended: so what
// such a call reads is shared, and the loop waits only for calls that have begun.
class XlaTeam final : public Executor {
 public:
  explicit XlaTeam(ffi::ThreadPool& pool) : pool_(pool) {}

  void run(int slots, void (*work)(void* context, int slot), void* context) override {
    const auto state = std::make_shared<State>();
    for (int slot = 1; slot < slots; ++slot)
      pool_.Schedule([state, slot, work, context] {
        if (!state->begin()) return;
        work(context, slot);
        state->end();
      });
    work(context, 0);
    state->close();
  }

 private:
  class State {
   public:
    bool begin() {
      const std::lock_guard lock(mutex_);
      active_ += !closed_;
      return !closed_;
    }
    void end() {
      const std::lock_guard lock(mutex_);
      if (--active_ == 0) idle_.notify_all();
    }
    void close() {
      std::unique_lock lock(mutex_);
      closed_ = true;
      idle_.wait(lock, [this] { return active_ == 0; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable idle_;
    int active_ = 0;
    bool closed_ = false;
  };

  ffi::ThreadPool& pool_;
};

struct Known {
  Problem problem;
  Plan plan;
};

// The plan of a call, made from its numbers at the first one. A program that was exported brings nothing else.
std::shared_ptr<const Known> plan_of(ffi::Span<const int64_t> numbers, int threads) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const Known>> plans;
  constexpr size_t most_plans = 4096;
  std::string key(reinterpret_cast<const char*>(numbers.begin()), numbers.size() * sizeof(int64_t));
  key += std::to_string(threads);
  const std::lock_guard lock(mutex);
  auto found = plans.find(key);
  if (found == plans.end()) {
    if (numbers.size() != plan_numbers) throw std::runtime_error("a plan of convgrad has another number of values");
    Problem problem = problem_from(numbers.begin(), threads);
    Plan plan = choose_plan(problem);
    if (plans.size() >= most_plans) plans.clear();
    found = plans.emplace(std::move(key), std::make_shared<const Known>(Known{problem, std::move(plan)})).first;
  }
  return found->second;
}

// Operands are grad_output, input, weight, those that are needed; results in the order of wrt. All are dense in the
// axis order whose strides the numbers hold.
Arguments arguments_of(const Problem& problem, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const unsigned wrt = problem.wrt;
  const int64_t narrow = size_of(problem.dtype), wide = size_of(problem.out_dtype);
  Arguments arguments;
  size_t at = 0;
  const auto placed = [&](void* data, const int64_t (&nominal)[5], int64_t size) {
    Tensor tensor;
    tensor.data = static_cast<char*>(data);
    for (int axis = 0; axis < 5; ++axis) tensor.stride[axis] = nominal[axis] / narrow * size;
    return tensor;
  };
  const auto operand = [&](const int64_t (&nominal)[5]) {
    return placed(operands.get<ffi::AnyBuffer>(at++).value().untyped_data(), nominal, narrow);
  };
  if (wrt & (wrt_input | wrt_weight | wrt_bias)) arguments.y = operand(problem.y_nominal);
  if (wrt & (wrt_output | wrt_weight)) arguments.x = operand(problem.x_nominal);
  if (wrt & (wrt_output | wrt_input)) arguments.w = operand(problem.w_nominal);
  at = 0;
  const auto result = [&] { return results.get<ffi::AnyBuffer>(at++).value()->untyped_data(); };
  if (wrt & wrt_output) arguments.y = placed(result(), problem.y_nominal, wide);
  if (wrt & wrt_input) arguments.x = placed(result(), problem.x_nominal, wide);
  if (wrt & wrt_weight) arguments.w = placed(result(), problem.w_nominal, wide);
  if (wrt & wrt_bias) {
    arguments.db.data = static_cast<char*>(result());
    arguments.db.stride[0] = wide;
  }
  return arguments;
}

ffi::Error compute_on_host(ffi::ThreadPool pool, ffi::Span<const int64_t> numbers, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) try {
  const int threads = int(std::clamp<int64_t>(pool.num_threads(), 1, max_threads));
  const auto known = plan_of(numbers, threads);
  Arguments arguments = arguments_of(known->problem, operands, results);
  arguments.threads = known->plan.threads;
  const Scratch scratch(known->plan.workspace_bytes);
  arguments.workspace = scratch.data();
  XlaTeam team(pool);
  const ExecutorScope scope(&team);
  known->plan.run(arguments);
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}

// `handle` is that of a prepared call, which the program that traced this one keeps.
ffi::Error launch_on_gpu(void* stream, ffi::ScratchAllocator scratch, int64_t handle, int64_t workspace_bytes,
                         ffi::RemainingArgs operands, ffi::RemainingRets results) try {
  gpu::Address addresses[8];
  size_t count = 0;
  for (size_t at = 0; at < operands.size(); ++at)
    addresses[count++] = gpu::Address(operands.get<ffi::AnyBuffer>(at).value().untyped_data());
  for (size_t at = 0; at < results.size(); ++at)
    addresses[count++] = gpu::Address(results.get<ffi::AnyBuffer>(at).value()->untyped_data());
  gpu::Address workspace = 0;
  if (workspace_bytes > 0) {
    // XLA refuses to promise more than 16; its allocator gives multiples of 256.
    const std::optional<void*> found = scratch.Allocate(size_t(workspace_bytes), 16);
    if (!found) return ffi::Error::Internal("XLA has no " + std::to_string(workspace_bytes) + " bytes for a workspace");
    workspace = gpu::Address(*found);
  }
  reinterpret_cast<gpu::PreparedCall*>(handle)->run(addresses, stream, workspace);
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}

XLA_FFI_DEFINE_HANDLER(host_handler, compute_on_host,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<ffi::Span<const int64_t>>("numbers")
                           .RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER(gpu_handler, launch_on_gpu,
                       ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::ScratchAllocator>()
                           .Attr<int64_t>("handle").Attr<int64_t>("workspace_bytes").RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace convgrad

void convgrad::bind_xla(nanobind::module_& module) {
  nanobind::dict handlers;
  handlers["cpu"] = nanobind::capsule(reinterpret_cast<void*>(host_handler), "xla._CUSTOM_CALL_TARGET");
  handlers["CUDA"] = nanobind::capsule(reinterpret_cast<void*>(gpu_handler), "xla._CUSTOM_CALL_TARGET");
  module.attr("xla_handlers") = handlers;
  module.attr("xla_ffi_version") = nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

#else

void convgrad::bind_xla(nanobind::module_& module) { module.attr("xla_handlers") = nanobind::dict(); }

#endif
