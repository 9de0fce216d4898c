// The threads of the torch that is loaded into this process. Its OpenMP workers keep spinning for milliseconds after
// every region, on the processors that our own pool would need: so calls on torch tensors run on those workers.
#pragma once

#include "threads.h"

namespace convgrad {

// The team, or null: torch is not loaded, offers no way in that we know, or this is a child after fork, where the
// workers of OpenMP are gone and a region would wait for them for ever.
Executor* torch_team();

// torch.get_num_threads() of the calling thread; 0 where torch is not loaded or does not say.
int torch_threads();

// Threads for a call on torch tensors: as many as torch would use, and no more than we have been told to.
int threads_for_torch();

// How the team is entered: "torch_parallel_for", "GOMP_parallel", or "" where torch_team() is null.
const char* torch_team_name();

// Enter by GOMP_parallel even where torch_parallel_for is there; for tests.
void prefer_gomp(bool prefer);

}  // namespace convgrad
