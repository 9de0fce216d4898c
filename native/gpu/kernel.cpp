// Loads compiled kernels onto devices.
#include "kernel.h"

namespace convgrad::gpu {

namespace {

constexpr int shared_without_asking = 48 * 1024;  // more must be asked for, function by function
constexpr int portable_cluster = 8;               // blocks; more must be asked for, too

}  // namespace

void* Kernel::on(const Driver& driver, int device) {
  const std::lock_guard lock(mutex_);
  void*& function = functions_[{&driver, device}];
  if (!function) function = load(driver, device);
  return function;
}

void* Kernel::load(const Driver& driver, int device) const {
  const std::string what = "loading kernel " + name;
  int most_shared = 0, most_threads = 0, static_shared = 0;
  driver.check(driver.DeviceGetAttribute(&most_shared, device_max_shared_optin, device), what);
  if (needs.shared_bytes > most_shared)
    throw OutOfResources("kernel " + name + " needs " + std::to_string(needs.shared_bytes) +
                            " bytes of shared memory, but device " + std::to_string(device) + " has " +
                            std::to_string(most_shared));
  void *module = nullptr, *function = nullptr;
  driver.check(driver.ModuleLoadData(&module, image_.data()), what);
  driver.check(driver.ModuleGetFunction(&function, module, name.c_str()), what);
  driver.check(driver.FuncGetAttribute(&most_threads, function_max_threads, function), what);
  if (needs.threads > most_threads)
    throw OutOfResources("kernel " + name + " needs blocks of " + std::to_string(needs.threads) +
                            " threads, but its registers allow " + std::to_string(most_threads));
  if (needs.shared_bytes > shared_without_asking) {
    driver.check(driver.FuncSetCacheConfig(function, cache_prefer_shared), what);
    driver.check(driver.FuncGetAttribute(&static_shared, function_static_shared, function), what);
    driver.check(driver.FuncSetAttribute(function, function_max_dynamic_shared, most_shared - static_shared), what);
  }
  if (needs.cluster > portable_cluster) driver.check(driver.FuncSetAttribute(function, function_large_cluster, 1), what);
  return function;
}

}  // namespace convgrad::gpu
