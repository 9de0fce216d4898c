// A CUDA driver that computes nothing and writes down what it is asked for: one line for each call that matters.
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

struct Attribute {
  uint32_t id, padding;
  union {
    char size[64];
    unsigned extent[3];
  } value;
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};
struct Function {
  std::string name;
  int parameters;
};

std::mutex mutex;
std::string lines;
std::map<std::string, int> parameters;        // by the kernel's name: the driver would know their number
std::map<std::string, Function> functions;
std::set<uint64_t> mapped;                    // addresses of which tensor maps were made
std::string failing;                          // the function that fails next
int failure = 0, after = 0;
thread_local void* context = nullptr;

std::string text(uint64_t number) { return std::to_string(number); }

void note(const std::string& line) { lines += line + "\n"; }

int outcome(const char* name) {
  if (failing != name || after-- > 0) return 0;
  failing.clear();
  return failure;
}

}  // namespace

extern "C" {

const char* fake_lines() { return lines.c_str(); }
void fake_forget() {
  const std::lock_guard lock(mutex);
  lines.clear();
}
void fake_parameters(const char* name, int count) { parameters[name] = count; }
void fake_failure(const char* name, int status, int calls_before) {
  failing = name;
  failure = status;
  after = calls_before;
}

int cuGetErrorString(int status, const char** words) {
  *words = status == 700 ? "an illegal memory access was encountered" : nullptr;
  return 0;
}
int cuCtxGetCurrent(void** found) {
  *found = context;
  return 0;
}
int cuCtxSetCurrent(void* wanted) {
  const std::lock_guard lock(mutex);
  context = wanted;
  note("context " + text(uint64_t(wanted)));
  return 0;
}
int cuDevicePrimaryCtxRetain(void** found, int device) {
  *found = reinterpret_cast<void*>(uintptr_t(100 + device));
  return outcome("cuDevicePrimaryCtxRetain");
}
int cuDeviceGetAttribute(int* found, int, int) {
  *found = 227 * 1024;
  return 0;
}
int cuModuleLoadData(void** found, const void* image) {
  const std::lock_guard lock(mutex);
  *found = const_cast<void*>(image);
  return outcome("cuModuleLoadData");
}
int cuModuleGetFunction(void** found, void*, const char* name) {
  const std::lock_guard lock(mutex);
  note(std::string("load ") + name);
  functions[name] = {name, parameters[name]};
  *found = &functions[name];
  return 0;
}
int cuFuncGetAttribute(int* found, int attribute, void*) {
  *found = attribute == 0 ? 512 : 1024;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  const std::lock_guard lock(mutex);
  note("set " + static_cast<Function*>(function)->name + " " + text(attribute) + "=" + text(value));
  return 0;
}
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  const std::lock_guard lock(mutex);
  note("memset " + text(address) + " value " + text(value) + " bytes " + text(bytes) + " stream " +
       text(uint64_t(stream)));
  return outcome("cuMemsetD8Async");
}
int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* extents,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  const std::lock_guard lock(mutex);
  std::string line = "encode " + text(uint64_t(address)) + " type " + text(type);
  const auto list = [&line](const char* name, const auto* values, uint32_t count) {
    line += std::string(" ") + name;
    for (uint32_t at = 0; at < count; ++at) line += (at ? "," : " ") + text(values[at]);
  };
  list("extents", extents, rank);
  list("strides", strides, rank - 1);
  list("box", box, rank);
  list("steps", steps, rank);
  note(line + " modes " + text(interleave) + text(swizzle) + text(promotion) + text(fill));
  if (uintptr_t(map) % 64) return 1;
  map[0] = uint64_t(address);
  mapped.insert(map[0]);
  return outcome("cuTensorMapEncodeTiled");
}
int cuTensorMapReplaceAddress(uint64_t* map, void* address) {
  const std::lock_guard lock(mutex);
  map[0] = uint64_t(address);
  mapped.insert(map[0]);
  return outcome("cuTensorMapReplaceAddress");
}
int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void**) {
  const std::lock_guard lock(mutex);
  const Function& kernel = *static_cast<Function*>(function);
  std::string line = "launch " + kernel.name + " grid";
  for (unsigned extent : config->grid) line += " " + text(extent);
  line += " block " + text(config->block[0]) + " shared " + text(config->shared) + " stream " +
          text(uint64_t(config->stream)) + " context " + text(uint64_t(context));
  for (unsigned at = 0; at < config->count; ++at)
    line += " attribute " + text(config->attributes[at].id) + ":" + text(config->attributes[at].value.extent[0]);
  line += " with";
  for (int at = 0; at < kernel.parameters; ++at) {
    uint64_t value;
    std::memcpy(&value, arguments[at], 8);
    const bool map = uintptr_t(arguments[at]) % 128 == 0 && mapped.count(value);
    line += (map ? " map@" : " ") + text(value);
  }
  note(line);
  return outcome("cuLaunchKernelEx");
}
}
