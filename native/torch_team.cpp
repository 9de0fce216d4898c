// Functions are looked up in the loaded libtorch_cpu.so at run time: building needs no torch, and any version serves.
#include "torch_team.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>

namespace convgrad {
namespace {

using Work = void (*)(void* context, int slot);

template <typename Function>
void find(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

// at::parallel_for of torch 2.10 and later, by its stable C interface.
struct ParallelFor final : Executor {
  int32_t (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
  int32_t (*get_num_threads)(uint32_t*);

  explicit ParallelFor(void* torch) {
    find(parallel_for, torch, "torch_parallel_for");
    find(get_num_threads, torch, "torch_get_num_threads");
  }
  bool found() const { return parallel_for && get_num_threads; }
  int threads() const {
    uint32_t threads = 0;
    return get_num_threads(&threads) == 0 ? int(threads) : 0;
  }

  struct Region {
    Work work;
    void* context;
  };
  // A torch with fewer threads gives one of them several slots, the first of which does the work.
  void run(int slots, Work work, void* context) override {
    Region region{work, context};
    const auto body = [](int64_t begin, int64_t end, void* argument) {
      const Region& region = *static_cast<const Region*>(argument);
      for (int64_t slot = begin; slot < end; ++slot) region.work(region.context, int(slot));
    };
    if (parallel_for(0, slots, 1, body, &region) != 0) work(context, 0);  // it could not begin
  }
};

// The OpenMP runtime that an older torch is linked with, by the interface that GCC compiles `omp parallel` into; the
// runtimes of LLVM and Intel have it too.
struct OpenMp final : Executor {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread_num)();
  int (*max_threads)();
  int (*in_parallel)();

  explicit OpenMp(void* torch) {  // dlsym looks into the libraries that torch needs, too
    find(parallel, torch, "GOMP_parallel");
    find(thread_num, torch, "omp_get_thread_num");
    find(max_threads, torch, "omp_get_max_threads");
    find(in_parallel, torch, "omp_in_parallel");
  }
  bool found() const { return parallel && thread_num && max_threads && in_parallel; }

  struct Region {
    Work work;
    void* context;
    int slots;
    int (*thread_num)();
  };
  void run(int slots, Work work, void* context) override {
    const int threads = std::min(slots, max_threads());
    if (threads < 2 || in_parallel()) return work(context, 0);
    Region region{work, context, slots, thread_num};
    const auto body = [](void* argument) {
      const Region& region = *static_cast<const Region*>(argument);
      if (const int slot = region.thread_num(); slot < region.slots) region.work(region.context, slot);
    };
    parallel(body, &region, unsigned(threads), 0);
  }
};

struct Torch {
  ParallelFor parallel_for;
  OpenMp open_mp;
  explicit Torch(void* library) : parallel_for(library), open_mp(library) {}
};

std::atomic<bool> forked{false}, gomp_preferred{false};

Torch* loaded_torch() {
  static std::atomic<Torch*> known{nullptr};
  if (Torch* torch = known.load(std::memory_order_acquire)) return torch;
  void* const library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!library) return nullptr;  // perhaps later
  Torch* const found = new Torch(library);  // never destroyed: torch cannot be unloaded
  Torch* earlier = nullptr;
  if (!known.compare_exchange_strong(earlier, found)) {
    delete found;
    return earlier;
  }
  pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  return found;
}

}  // namespace

Executor* torch_team() {
  Torch* const torch = loaded_torch();
  if (!torch || forked.load(std::memory_order_relaxed)) return nullptr;
  if (torch->parallel_for.found() && !gomp_preferred.load(std::memory_order_relaxed)) return &torch->parallel_for;
  return torch->open_mp.found() ? &torch->open_mp : nullptr;
}

int torch_threads() {
  Torch* const torch = loaded_torch();
  if (!torch) return 0;
  if (torch->parallel_for.found()) return torch->parallel_for.threads();
  return torch->open_mp.found() ? torch->open_mp.max_threads() : 0;
}

int threads_for_torch() {
  const int torch = torch_threads();
  return torch > 0 ? std::min(torch, get_threads()) : get_threads();
}

const char* torch_team_name() {
  Executor* const team = torch_team();
  return !team ? "" : team == &loaded_torch()->parallel_for ? "torch_parallel_for" : "GOMP_parallel";
}

void prefer_gomp(bool prefer) { gomp_preferred.store(prefer); }

}  // namespace convgrad
