// The part of the CUDA driver that launches need, declared here: no CUDA header is needed to build, and no GPU to load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace convgrad::gpu {

using Status = int;  // CUresult: 0 is success
using Address = uint64_t;

// CUlaunchAttribute
struct LaunchAttribute {
  uint32_t id;
  uint32_t padding;
  union {
    char size[64];
    int flag;
    unsigned extent[3];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};

// CUtensorMap
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

enum : uint32_t { attribute_cooperative = 2, attribute_cluster = 4, attribute_cluster_policy = 5, attribute_pdl = 6 };
enum : int { cluster_policy_spread = 1 };
enum : int { function_max_threads = 0, function_static_shared = 1, function_max_dynamic_shared = 8,
             function_large_cluster = 14 };
enum : int { device_max_shared_optin = 97 };
enum : int { cache_prefer_shared = 1 };

// The driver's functions, under their names without "cu".
struct Driver {
  Status (*GetErrorString)(Status, const char**);
  Status (*CtxGetCurrent)(void**);
  Status (*CtxSetCurrent)(void*);
  Status (*DevicePrimaryCtxRetain)(void**, int);
  Status (*DeviceGetAttribute)(int*, int, int);
  Status (*ModuleLoadData)(void**, const void*);
  Status (*ModuleGetFunction)(void**, void*, const char*);
  Status (*FuncGetAttribute)(int*, int, void*);
  Status (*FuncSetAttribute)(void*, int, int);
  Status (*FuncSetCacheConfig)(void*, int);
  Status (*LaunchKernelEx)(const LaunchConfig*, void*, void**, void**);
  Status (*MemsetD8Async)(Address, unsigned char, size_t, void*);
  Status (*TensorMapEncodeTiled)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                 const uint32_t*, int, int, int, int);
  Status (*TensorMapReplaceAddress)(TensorMap*, void*);

  // The driver's library, opened once for each path; throws where it or one of its functions is missing.
  static const Driver& open(const std::string& path);

  // Throws std::runtime_error with the driver's words for a status that is not success.
  void check(Status status, const std::string& what) const;
};

// Makes a device's primary context the calling thread's for a while: a thread that never used CUDA has none.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, void* context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  void* previous_ = nullptr;
  bool changed_ = false;
};

}  // namespace convgrad::gpu
