// The thread pool. A job is an array of task ids, a run of them for every thread; idle workers join any open job.
//
// A thread takes the tasks of its run in order, and then what is left of the others'. So it meets the same part of the
// operands and results in all passes of a call and in the calls that follow: two threads may have no cache in common
// (on EPYC cores of other dies have not), and then what another thread wrote costs more than what comes from memory.
//
// The caller works on its own job and then waits only for helpers that have joined it, so a job finishes even if no
// worker is ever free: no deadlock beside other pools, from several calling threads, or in a child after fork.
#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "conv.h"

namespace convgrad {
namespace {

thread_local Interruptible* current_watch = nullptr;
constexpr auto pause_between_questions = std::chrono::milliseconds(50);

struct Job {
  void (*body)(void*, int64_t, int);
  void* context;
  int helpers_wanted;
  std::atomic<int> joined{0};   // helpers that ever joined: their slots are 1, 2, …
  std::atomic<int> working{0};  // helpers inside the job now
  Interruptible* const watch = current_watch;

  // The tasks of one slot that have not been started.
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t last;
    bool done() const { return next.load(std::memory_order_relaxed) >= last; }
  };
  Run runs[max_threads];

  Job(void (*body)(void*, int64_t, int), void* context, int64_t tasks, int helpers)
      : body(body), context(context), helpers_wanted(helpers) {
    const int64_t slots = helpers + 1, each = tasks / slots, more = tasks % slots;
    for (int64_t slot = 0, first = 0; slot < slots; ++slot) {
      runs[slot].next.store(first, std::memory_order_relaxed);
      first = runs[slot].last = first + each + (slot < more);
    }
  }

  bool done() const {
    return std::all_of(runs, runs + helpers_wanted + 1, [](const Run& run) { return run.done(); });
  }

  void work(int slot) {
    for (int i = 0; i <= helpers_wanted; ++i) {
      Run& run = runs[(slot + i) % (helpers_wanted + 1)];
      if (run.done()) continue;
      for (int64_t task; (task = run.next.fetch_add(1, std::memory_order_relaxed)) < run.last;) {
        if (watch && watch->stops(watch == current_watch)) return;
        body(context, task, slot);
      }
    }
  }
};

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// How long an idle worker looks for the next job before it sleeps: covers the gap between the passes of one call,
// and between calls that follow each other: waking it takes 15 to 50 microseconds.
constexpr auto idle_spin = std::chrono::microseconds(100);

// Up to so many CPUs, workers are kept off the caller's. The kernel may wake a worker on the CPU of the thread that wakes
// it, and then moves it only after some milliseconds: a call of that length would have run on one CPU.
constexpr int few_cpus = 16;

class Pool {
 public:
  Pool() {
    if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) CPU_ZERO(&allowed_);
  }

  void run(Job& job) {
    if (job.helpers_wanted > 0) {
      std::lock_guard lock(mutex_);
      ensure_workers(job.helpers_wanted);
      leave_caller_its_cpu(job.helpers_wanted);
      jobs_.push_back(&job);
      announced_.fetch_add(1, std::memory_order_release);
    }
    if (job.helpers_wanted == 1) wake_.notify_one();
    if (job.helpers_wanted > 1) wake_.notify_all();
    job.work(0);
    if (job.helpers_wanted > 0) {
      {
        std::lock_guard lock(mutex_);  // after this no worker can join any more
        jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
      }
      for (int spins = 0; job.working.load(std::memory_order_acquire) != 0; ++spins) {
        pause_cpu();
        if (spins > 2000) std::this_thread::yield();
      }
    }
  }

 private:
  void ensure_workers(int wanted) {
    while (int(workers_.size()) < std::min(wanted, max_threads - 1)) {
      try {
        std::thread worker([this] { serve(); });
        workers_.push_back(worker.native_handle());
        worker.detach();
      } catch (const std::system_error&) {
        return;  // the caller alone is enough
      }
      left_free_ = -1;
    }
  }

  void leave_caller_its_cpu(int helpers) {
    const int cpu = sched_getcpu();
    if (cpu == left_free_ || cpu < 0 || !CPU_ISSET(cpu, &allowed_)) return;
    const int cpus = CPU_COUNT(&allowed_);
    if (cpus < 2 || cpus > few_cpus || helpers >= cpus) return;
    cpu_set_t others = allowed_;
    CPU_CLR(cpu, &others);
    for (const pthread_t worker : workers_) pthread_setaffinity_np(worker, sizeof others, &others);
    left_free_ = cpu;
  }

  // Under the lock: a job that wants another helper, joined; or null.
  Job* join(int& slot) {
    for (Job* job : jobs_) {
      if (job->joined.load() >= job->helpers_wanted || job->done()) continue;
      slot = job->joined.fetch_add(1) + 1;
      job->working.fetch_add(1);
      return job;
    }
    return nullptr;
  }

  void serve() {
    for (;;) {
      int slot = 0;
      Job* job;
      {
        std::unique_lock lock(mutex_);
        while (!(job = join(slot))) {
          const uint64_t seen = announced_.load();
          lock.unlock();
          const auto deadline = std::chrono::steady_clock::now() + idle_spin;
          while (announced_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < deadline)
            pause_cpu();
          lock.lock();
          if (announced_.load() == seen) wake_.wait(lock);
        }
      }
      job->work(slot);
      job->working.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Job*> jobs_;
  std::atomic<uint64_t> announced_{0};
  std::vector<pthread_t> workers_;  // they never end
  cpu_set_t allowed_;
  int left_free_ = -1;  // the CPU that workers are kept off
};

// Never destroyed (workers may outlive main) and replaced in a forked child, where only the forking thread lives on.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    the_pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool); });
  });
  return *the_pool.load();
}

thread_local Executor* current_executor = nullptr;  // null: our pool

std::atomic<int> chosen_threads{0};

// CPUs allowed by the cgroup's quota ("max 100000" or "150000 100000"), 0 if unlimited or unknown.
int cgroup_cpus() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period && quota != "max" && period > 0) return std::max(1, int(std::atof(quota.c_str()) / period));
  std::ifstream v1("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double limit = 0;
  if (v1 >> limit && v1_period >> period && limit > 0 && period > 0) return std::max(1, int(limit / period));
  return 0;
}

int count_cpus() {
  if (const char* text = std::getenv("CONVGRAD_NUM_THREADS")) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (end != text && *end == 0 && value > 0) return int(std::min<long>(value, max_threads));
    std::fprintf(stderr, "convgrad: CONVGRAD_NUM_THREADS=%s is not a positive number, ignored\n", text);
  }
  int cpus = int(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
  if (const int quota = cgroup_cpus()) cpus = std::min(cpus, quota);
  return std::clamp(cpus, 1, max_threads);
}

}  // namespace

void parallel_for(int64_t tasks, int threads, void (*body)(void*, int64_t, int), void* context) {
  if (tasks <= 0) return;
  const int helpers = int(std::min<int64_t>(std::min(threads, max_threads), tasks)) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks && !(current_watch && current_watch->stops(true)); ++task)
      body(context, task, 0);
    return;
  }
  Job job(body, context, tasks, helpers);
  if (!current_executor) return pool().run(job);
  current_executor->run(helpers + 1, [](void* job, int slot) { static_cast<Job*>(job)->work(slot); }, &job);
}

Interruptible::Interruptible(bool (*asked)())
    : asked_(asked), outer_(current_watch), next_(std::chrono::steady_clock::now() + pause_between_questions) {
  current_watch = this;
}
Interruptible::~Interruptible() { current_watch = outer_; }

bool Interruptible::stops(bool owner) {
  if (given_up()) return true;
  if (!owner) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return false;
  next_ = now + pause_between_questions;
  if (asked_()) given_up_.store(true, std::memory_order_relaxed);
  return given_up();
}

ExecutorScope::ExecutorScope(Executor* executor) : outer_(current_executor) { current_executor = executor; }
ExecutorScope::~ExecutorScope() { current_executor = outer_; }

int default_threads() {
  static const int cpus = count_cpus();
  return cpus;
}

int get_threads() {
  const int chosen = chosen_threads.load();
  return chosen > 0 ? chosen : default_threads();
}

void set_threads(int threads) { chosen_threads.store(std::clamp(threads, 0, max_threads)); }

}  // namespace convgrad
