// Memory for workspaces that the caller does not provide: a few blocks are kept, because fresh pages cost more than
// many a convolution.
#pragma once

#include <cstdint>

namespace convgrad {

class Scratch {
 public:
  explicit Scratch(int64_t bytes);  // throws std::bad_alloc
  ~Scratch();
  Scratch(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace convgrad
