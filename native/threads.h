// Parallel loops: fixed task ids, a run of them for every thread and what is left for whoever is free. The caller always
// takes part, so nothing can deadlock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace convgrad {

// Runs body(context, task, slot) for every task in [0, tasks), on at most `threads` threads, and returns when all are
// done. A slot (0 <= slot < threads) is used by one thread at a time: the index of its scratch memory. A thread runs
// tasks in ascending order, mostly neighbours. Which thread runs a task is not fixed: results must depend on the task
// id alone. Bodies must not throw and must not call parallel_for.
void parallel_for(int64_t tasks, int threads, void (*body)(void*, int64_t task, int slot), void* context);

// Threads that another library owns, to run our loops on: two pools of busy threads on the same processors would only
// hold each other up.
class Executor {
 public:
  // Calls work(context, slot) for slot 0 and for any of the slots below `slots`, each at most once, and returns when
  // all calls have returned. Whoever is called first starts; a call that comes late finds nothing left and returns at
  // once, so the calls may also follow each other on one thread.
  virtual void run(int slots, void (*work)(void* context, int slot), void* context) = 0;

 protected:
  ~Executor() = default;
};

// While it lives, the loops of the thread that made it run on `executor` instead of our own pool (null: our pool).
class ExecutorScope {
 public:
  explicit ExecutorScope(Executor* executor);
  ~ExecutorScope();
  ExecutorScope(const ExecutorScope&) = delete;

 private:
  Executor* const outer_;
};

// While it lives, the loops of the thread that made it can be given up: between two tasks, every 50 milliseconds at most,
// that thread asks, and when the answer is yes no further task of this loop and of those that follow is begun. What the
// tasks were to write is then undefined.
class Interruptible {
 public:
  explicit Interruptible(bool (*asked)());
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  bool given_up() const { return given_up_.load(std::memory_order_relaxed); }
  // Whether to begin no further task; `owner`: this is the thread that may ask.
  bool stops(bool owner);

 private:
  bool (*const asked_)();
  Interruptible* const outer_;
  std::atomic<bool> given_up_{false};
  std::chrono::steady_clock::time_point next_;
};

// The same for a lambda `void(int64_t task, int slot)`.
template <typename Body>
void parallel_for(int64_t tasks, int threads, Body&& body) {
  parallel_for(
      tasks, threads, [](void* context, int64_t task, int slot) { (*static_cast<Body*>(context))(task, slot); }, &body);
}

// CPUs this process may use: affinity and cgroup quota; CONVGRAD_NUM_THREADS overrides.
int default_threads();
// What a plan uses when it is not told: default_threads() or the last set_threads(n > 0).
int get_threads();
void set_threads(int threads);  // 0 goes back to the default

}  // namespace convgrad
