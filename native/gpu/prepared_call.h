// A call with nothing left to decide: kernels, grids, arguments and tensor maps, all but the tensors' addresses.
//
// Addresses come in slots: one for each operand, then one for each result, then the workspace. `run` writes the new
// ones where they belong, in arguments and tensor maps, and makes the launches in order. It may be called by several
// threads, each with a stream of its own: the arguments' memory is one, so they take turns.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "kernel.h"

namespace convgrad::gpu {

// What a tensor map says but for the address; extents and strides begin at the narrowest axis, as the driver has them.
struct MapShape {
  int type = 0, swizzle = 0, fill = 0;
  std::vector<uint64_t> extents, strides;  // elements, bytes; the narrowest axis has no stride
  std::vector<uint32_t> box, steps;
};

class PreparedCall {
 public:
  // `problem` is for messages; `slots` is the number of operands and results.
  PreparedCall(std::string problem, int slots, int device, std::string driver_path);

  // The next step is a launch; its arguments follow in the kernel's order.
  void add_launch(std::shared_ptr<Kernel> kernel, std::array<unsigned, 3> grid);
  void add_pointer(int slot, int64_t offset);
  void add_scalar(const void* value, size_t bytes);
  void add_tensor_map(int slot, int64_t offset, MapShape shape);
  // The next step fills bytes with zeros.
  void add_zeros(int slot, int64_t offset, size_t bytes);

  void set_workspace_bytes(int64_t bytes) { workspace_bytes_ = bytes; }
  int64_t workspace_bytes() const { return workspace_bytes_; }
  int slots() const { return slots_; }
  size_t steps() const { return steps_.size(); }

  // Start all steps on a stream; throws std::runtime_error with kernel, problem and what the driver says.
  void run(const Address* addresses, void* stream, Address workspace);

 private:
  struct Scalar {
    alignas(8) unsigned char bytes[8];
  };
  struct Map {
    MapShape shape;
    TensorMap map;
    std::vector<std::pair<Address, TensorMap>> known;  // of earlier addresses: allocators give the same ones again
    size_t oldest = 0;
  };
  struct Launch {
    std::shared_ptr<Kernel> kernel;
    LaunchConfig config;
    std::vector<LaunchAttribute> attributes;
    std::vector<void*> arguments;
    void* function = nullptr;  // once it is loaded
  };
  struct Zeros {
    Address address;
    size_t bytes;
  };
  struct Place {  // where a slot's address goes
    Address* pointer;
    Map* map;
    int64_t offset;
    size_t step;
  };
  struct Slot {
    Address address = 0;
    bool known = false;  // whether `address` is in all places
    std::vector<Place> places;
  };

  Launch& last_launch();
  Slot& slot(int number);
  void move(Slot& slot, Address address);
  void write(const Place& place, Address address);
  TensorMap map_at(Map& map, Address address, size_t step) const;
  void start(Launch& launch, void* stream);
  std::string named(size_t step) const;

  const std::string problem_, driver_path_;
  const int slots_, device_;
  const Driver* driver_ = nullptr;
  void* context_ = nullptr;
  std::vector<Slot> by_slot_;
  std::deque<std::variant<Launch, Zeros>> steps_;  // places point into these three: they must not move
  std::deque<Scalar> scalars_;
  std::deque<Map> maps_;
  int64_t workspace_bytes_ = 0;
  std::mutex mutex_;
};

}  // namespace convgrad::gpu

// The same for code that holds a call by its address (XLA's handlers): 0, or 1 with a message that ends in a zero byte.
extern "C" int convgrad_run_prepared(void* call, void* const* addresses, void* stream, void* workspace, char* message,
                                     size_t message_bytes);
