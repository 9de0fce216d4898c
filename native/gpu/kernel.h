// A compiled GPU kernel: its machine code and how it must be launched.
#pragma once

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "driver.h"

namespace convgrad::gpu {

// A kernel that needs more shared memory or threads than the device gives it.
class OutOfResources : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Kernel {
 public:
  struct Needs {
    int threads = 0;  // of a block
    int shared_bytes = 0;
    int cluster = 1;  // blocks that run together
    bool cooperative = false;
    bool pdl = false;  // may begin before the kernel before it has ended
  };

  Kernel(std::string name, std::string image, Needs needs)
      : name(std::move(name)), needs(needs), image_(std::move(image)) {}

  // The function's handle on a device whose context is current, loaded on first use.
  void* on(const Driver& driver, int device);

  const std::string name;
  const Needs needs;

 private:
  void* load(const Driver& driver, int device) const;

  const std::string image_;
  std::mutex mutex_;
  std::map<std::pair<const Driver*, int>, void*> functions_;
};

}  // namespace convgrad::gpu
