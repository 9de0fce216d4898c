// What the runtime functions and the operator functions share: device memory and the process that computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <sys/types.h>

#include "acl/acl.h"

struct aclOpExecutor {
    long id;
    std::vector<const void*> tensors;  // device memory that phase 2 reads or writes
};

namespace convgrad {

extern thread_local std::string message;  // of aclGetRecentErrMsg

struct State {
    std::mutex lock;
    bool initialised = false;
    int device = -1;
    int64_t deterministic = 0;
    char* arena = nullptr;
    int arena_fd = -1;
    std::map<size_t, size_t> blocks;  // offset -> bytes of what aclrtMalloc gave out
    int socket = -1;
    pid_t worker = -1;
    std::vector<std::unique_ptr<aclOpExecutor>> executors;  // kept until aclFinalize: a second use must be refused
};

State& state();

aclError fail(aclError code, const std::string& why);

// Bytes from an address to the end of its block; 0 for memory that aclrtMalloc did not give out.
size_t room_at(const State& s, const void* address);

// One request, one answer: "status size executor" and a line of text.
struct Answer {
    aclnnStatus status = ACLNN_ERR_RUNTIME_ERROR;
    uint64_t size = 0;
    long executor = -1;
};

Answer ask(State& s, const std::string& request);

}  // namespace convgrad
