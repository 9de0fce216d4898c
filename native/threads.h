// The thread pool: fixed task ids, a run of them for every thread and what is left for whoever is free. The caller
// always takes part, so nothing can deadlock.
#pragma once

#include <cstdint>

namespace convgrad {

// Runs body(context, task, slot) for every task in [0, tasks), on at most `threads` threads, and returns when all are
// done. A slot (0 <= slot < threads) is used by one thread at a time: the index of its scratch memory. A thread runs
// tasks in ascending order, mostly neighbours. Which thread runs a task is not fixed: results must depend on the task
// id alone. Bodies must not throw and must not call parallel_for.
void parallel_for(int64_t tasks, int threads, void (*body)(void*, int64_t task, int slot), void* context);

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
