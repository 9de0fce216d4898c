// Devices, streams, memory, and the Python process that answers both phases of every operator with convgrad.cann, so
// that there is one implementation. Device memory is one shared mapping, which that process maps too.
//
// CONVGRAD_PYTHON and CONVGRAD_PATH are defined by who builds this: the interpreter, and where the package lies.

#include "device.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace convgrad {

thread_local std::string message;

State& state() {
    static State* found = new State;  // never destroyed: streams may be closed while the program ends
    return *found;
}

aclError fail(aclError code, const std::string& why) {
    message = why;
    return code;
}

namespace {

constexpr size_t ARENA = size_t{1} << 38;  // address space only: pages exist once they are touched
constexpr size_t PAGE = 4096;
constexpr int ARENA_FD = 198, SOCKET_FD = 199;

// The block that holds an address, or blocks.end().
std::map<size_t, size_t>::const_iterator block_of(const State& s, const void* address) {
    const char* at = static_cast<const char*>(address);
    if (s.arena == nullptr || at < s.arena || at >= s.arena + ARENA) return s.blocks.end();
    const size_t offset = static_cast<size_t>(at - s.arena);
    auto next = s.blocks.upper_bound(offset);
    if (next == s.blocks.begin()) return s.blocks.end();
    --next;
    return offset < next->first + next->second ? next : s.blocks.end();
}

bool send_all(int socket, const char* data, size_t size) {
    while (size > 0) {
        const ssize_t sent = send(socket, data, size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        data += sent;
        size -= static_cast<size_t>(sent);
    }
    return true;
}

bool read_line(int socket, std::string& line) {
    line.clear();
    char letter;
    for (;;) {
        const ssize_t got = recv(socket, &letter, 1, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        if (letter == '\n') return true;
        line += letter;
    }
}

}  // namespace

size_t room_at(const State& s, const void* address) {
    const auto found = block_of(s, address);
    if (found == s.blocks.end()) return 0;
    return found->first + found->second - static_cast<size_t>(static_cast<const char*>(address) - s.arena);
}

Answer ask(State& s, const std::string& request) {
    Answer answer;
    std::string numbers, text;
    if (s.socket < 0) {
        message = "aclInit was not called, or aclFinalize was";
        answer.status = ACLNN_ERR_RUNTIME_ERROR;
        return answer;
    }
    const std::string line = request + "\n";
    if (!send_all(s.socket, line.data(), line.size()) || !read_line(s.socket, numbers) || !read_line(s.socket, text)) {
        message = "the process that computes has ended; its last words are on the standard error";
        return answer;
    }
    int status = 0;
    unsigned long long size = 0;
    if (std::sscanf(numbers.c_str(), "%d %llu %ld", &status, &size, &answer.executor) == 3) {
        answer.status = status;
        answer.size = size;
    }
    message = text;
    return answer;
}

namespace {

bool start_worker(State& s) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return false;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, s.arena_fd, ARENA_FD);
    posix_spawn_file_actions_adddup2(&actions, ends[1], SOCKET_FD);
    const char* python = std::getenv("CONVGRAD_PYTHON");
    std::string program = python != nullptr ? python : CONVGRAD_PYTHON;
    std::string code = "import sys; sys.path.insert(0, sys.argv[1]); "
                       "from convgrad.frontends.cann.worker import serve; serve(*map(int, sys.argv[2:]))";
    std::string path = CONVGRAD_PATH, arena = std::to_string(ARENA_FD), size = std::to_string(ARENA),
                socket = std::to_string(SOCKET_FD), c = "-c";
    char* arguments[] = {program.data(), c.data(),    code.data(),   path.data(),
                         arena.data(),   size.data(), socket.data(), nullptr};
    const int failed = posix_spawnp(&s.worker, program.c_str(), &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (failed != 0) {
        close(ends[0]);
        message = "cannot start " + program + ": " + std::strerror(failed);
        return false;
    }
    s.socket = ends[0];
    std::string ready;
    if (!read_line(s.socket, ready) || ready != "ready") {
        message = "the process that computes did not start: " + program + " cannot import convgrad";
        return false;
    }
    return true;
}

void stop_worker(State& s) {
    if (s.socket >= 0) close(s.socket);
    s.socket = -1;
    if (s.worker > 0) waitpid(s.worker, nullptr, 0);
    s.worker = -1;
}

}  // namespace

}  // namespace convgrad

using namespace convgrad;

extern "C" {

const char* aclGetRecentErrMsg(void) { return message.c_str(); }

size_t aclDataTypeSize(aclDataType dataType) {
    switch (dataType) {
        case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: case ACL_HIFLOAT8: case ACL_FLOAT8_E5M2:
        case ACL_FLOAT8_E4M3FN: return 1;
        case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: case ACL_COMPLEX64: return 8;
        case ACL_COMPLEX128: return 16;
        default: return 0;
    }
}

aclError aclInit(const char*) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (s.initialised) return fail(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before");
    message.clear();
    if (s.arena == nullptr) {
        s.arena_fd = memfd_create("convgrad device memory", MFD_CLOEXEC);
        if (s.arena_fd < 0 || ftruncate(s.arena_fd, ARENA) != 0) {
            return fail(ACL_ERROR_BAD_ALLOC, "no shared memory for the device");
        }
        void* mapped = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, s.arena_fd, 0);
        if (mapped == MAP_FAILED) return fail(ACL_ERROR_BAD_ALLOC, "no address space for the device");
        s.arena = static_cast<char*>(mapped);
    }
    if (!start_worker(s)) {
        stop_worker(s);
        return ACL_ERROR_INTERNAL_ERROR;
    }
    s.initialised = true;
    return ACL_SUCCESS;
}

aclError aclFinalize(void) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (!s.initialised) return fail(ACL_ERROR_UNINITIALIZE, "aclFinalize without aclInit");
    std::fflush(nullptr);  // programs that leave with _exit have printed what they computed
    stop_worker(s);
    s.executors.clear();
    s.initialised = false;
    s.device = -1;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t deviceId) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (!s.initialised) return fail(ACL_ERROR_UNINITIALIZE, "aclrtSetDevice before aclInit");
    if (deviceId < 0) return fail(ACL_ERROR_INVALID_PARAM, "aclrtSetDevice: deviceId is negative");
    s.device = deviceId;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* deviceId) {
    if (deviceId == nullptr || state().device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device was set");
    *deviceId = state().device;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
    if (count == nullptr) return fail(ACL_ERROR_INVALID_PARAM, "count is a null pointer");
    *count = 1;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) {
    state().device = -1;
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeDevice(void) { return ACL_SUCCESS; }

const char* aclrtGetSocName(void) {
    const char* product = std::getenv("CONVGRAD_CANN_PRODUCT");
    return product != nullptr ? product : "Ascend910B";
}

aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId) {
    if (context == nullptr) return fail(ACL_ERROR_INVALID_PARAM, "context is a null pointer");
    *context = &state();
    return aclrtSetDevice(deviceId);
}

aclError aclrtDestroyContext(aclrtContext) { return ACL_SUCCESS; }

aclError aclrtSetCurrentContext(aclrtContext context) {
    return context == nullptr ? fail(ACL_ERROR_INVALID_PARAM, "context is a null pointer") : ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream* stream) {
    if (stream == nullptr) return fail(ACL_ERROR_INVALID_PARAM, "stream is a null pointer");
    if (state().device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtCreateStream before aclrtSetDevice");
    *stream = std::malloc(1);
    return *stream == nullptr ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}

aclError aclrtDestroyStream(aclrtStream stream) {
    std::free(stream);
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (devPtr == nullptr || size == 0) return fail(ACL_ERROR_INVALID_PARAM, "aclrtMalloc: null pointer or size 0");
    if (s.device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc before aclrtSetDevice");
    size_t start = PAGE;  // first fit; a page stays free between blocks
    for (const auto& block : s.blocks) {
        if (block.first >= start && block.first - start >= size && block.first - start - size >= PAGE) break;
        start = (block.first + block.second + 2 * PAGE - 1) / PAGE * PAGE;
    }
    if (size > ARENA || start > ARENA - size) return fail(ACL_ERROR_BAD_ALLOC, "aclrtMalloc: no room");
    s.blocks[start] = size;
    *devPtr = s.arena + start;
    return ACL_SUCCESS;
}

aclError aclrtFree(void* devPtr) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    const auto found = block_of(s, devPtr);
    if (found == s.blocks.end() || s.arena + found->first != devPtr) {
        return fail(ACL_ERROR_INVALID_PARAM, "aclrtFree: the pointer is none that aclrtMalloc returned, or was freed");
    }
    const size_t last = (found->first + found->second + PAGE - 1) / PAGE * PAGE;
    if (fallocate(s.arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(found->first),
                  static_cast<off_t>(last - found->first)) != 0) {
        message = "the pages of freed memory stay";
    }
    s.blocks.erase(found->first);
    return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** hostPtr, size_t size) {
    if (hostPtr == nullptr || size == 0) return fail(ACL_ERROR_INVALID_PARAM, "aclrtMallocHost: null pointer or size 0");
    *hostPtr = std::malloc(size);
    return *hostPtr == nullptr ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}

aclError aclrtFreeHost(void* hostPtr) {
    std::free(hostPtr);
    return ACL_SUCCESS;
}

aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (count > maxCount || room_at(s, devPtr) < count) {
        return fail(ACL_ERROR_INVALID_PARAM, "aclrtMemset: more bytes than the memory has");
    }
    std::memset(devPtr, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (dst == nullptr || src == nullptr || count > destMax) {
        return fail(ACL_ERROR_INVALID_PARAM, "aclrtMemcpy: a null pointer, or count above destMax");
    }
    const bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    const bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    if (to_device != (block_of(s, dst) != s.blocks.end()) || from_device != (block_of(s, src) != s.blocks.end())) {
        return fail(ACL_ERROR_INVALID_PARAM, "aclrtMemcpy: kind does not say where dst and src lie");
    }
    if ((to_device && room_at(s, dst) < count) || (from_device && room_at(s, src) < count)) {
        return fail(ACL_ERROR_INVALID_PARAM, "aclrtMemcpy: count goes beyond the device memory");
    }
    std::memmove(dst, src, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind, aclrtStream) {
    return aclrtMemcpy(dst, destMax, src, count, kind);
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
    if (opt != ACL_OPT_DETERMINISTIC) return fail(ACL_ERROR_INVALID_PARAM, "aclrtCtxSetSysParamOpt: unknown option");
    state().deterministic = value;
    return ACL_SUCCESS;
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t* value) {
    if (opt != ACL_OPT_DETERMINISTIC || value == nullptr) return fail(ACL_ERROR_INVALID_PARAM, "unknown option");
    *value = state().deterministic;
    return ACL_SUCCESS;
}

}  // extern "C"
