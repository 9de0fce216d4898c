// Opens the CUDA driver's library and finds the functions in it.
#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace convgrad::gpu {

namespace {

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error("the CUDA driver " + path + " has no function " + name + ": it is too old");
}

std::unique_ptr<Driver> load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("the CUDA driver is not available: " + std::string(dlerror()));
  auto driver = std::make_unique<Driver>();
  find(library, path, "cuGetErrorString", driver->GetErrorString);
  find(library, path, "cuCtxGetCurrent", driver->CtxGetCurrent);
  find(library, path, "cuCtxSetCurrent", driver->CtxSetCurrent);
  find(library, path, "cuDevicePrimaryCtxRetain", driver->DevicePrimaryCtxRetain);
  find(library, path, "cuDeviceGetAttribute", driver->DeviceGetAttribute);
  find(library, path, "cuModuleLoadData", driver->ModuleLoadData);
  find(library, path, "cuModuleGetFunction", driver->ModuleGetFunction);
  find(library, path, "cuFuncGetAttribute", driver->FuncGetAttribute);
  find(library, path, "cuFuncSetAttribute", driver->FuncSetAttribute);
  find(library, path, "cuFuncSetCacheConfig", driver->FuncSetCacheConfig);
  find(library, path, "cuLaunchKernelEx", driver->LaunchKernelEx);
  find(library, path, "cuMemsetD8Async", driver->MemsetD8Async);
  find(library, path, "cuTensorMapEncodeTiled", driver->TensorMapEncodeTiled);
  find(library, path, "cuTensorMapReplaceAddress", driver->TensorMapReplaceAddress);
  return driver;
}

}  // namespace

const Driver& Driver::open(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Driver>> opened;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Driver>& driver = opened[path];
  if (!driver) driver = load(path);
  return *driver;
}

void Driver::check(Status status, const std::string& what) const {
  if (status == 0) return;
  const char* text = nullptr;
  GetErrorString(status, &text);
  throw std::runtime_error(what + ": CUDA error " + std::to_string(status) + ", " + (text ? text : "unknown"));
}

CurrentContext::CurrentContext(const Driver& driver, void* context) : driver_(driver) {
  driver.check(driver.CtxGetCurrent(&previous_), "current context");
  if (previous_ == context) return;
  driver.check(driver.CtxSetCurrent(context), "current context");
  changed_ = true;
}

CurrentContext::~CurrentContext() {
  if (changed_) driver_.CtxSetCurrent(previous_);
}

}  // namespace convgrad::gpu
