// Prepared calls: building them step by step, and running them.
#include "prepared_call.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace convgrad::gpu {

namespace {

constexpr int interleave_none = 0;
constexpr size_t most_known_maps = 8;
constexpr int promote_to_128_bytes = 2;  // what a copy fetches into the second-level cache at least

std::vector<LaunchAttribute> attributes_of(const Kernel::Needs& needs) {
  std::vector<LaunchAttribute> found;
  const auto add = [&](uint32_t id) -> LaunchAttribute& {
    found.push_back({});
    found.back().id = id;
    return found.back();
  };
  if (needs.pdl) add(attribute_pdl).value.flag = 1;
  if (needs.cooperative) add(attribute_cooperative).value.flag = 1;
  if (needs.cluster > 1) {
    LaunchAttribute& cluster = add(attribute_cluster);
    cluster.value.extent[0] = unsigned(needs.cluster);
    cluster.value.extent[1] = cluster.value.extent[2] = 1;
    add(attribute_cluster_policy).value.flag = cluster_policy_spread;
  }
  return found;
}

}  // namespace

PreparedCall::PreparedCall(std::string problem, int slots, int device, std::string driver_path)
    : problem_(std::move(problem)), driver_path_(std::move(driver_path)), slots_(slots), device_(device),
      by_slot_(size_t(slots) + 1) {}

void PreparedCall::add_launch(std::shared_ptr<Kernel> kernel, std::array<unsigned, 3> grid) {
  const Kernel::Needs& needs = kernel->needs;
  Launch launch;
  launch.attributes = attributes_of(needs);
  launch.config = {{grid[0] * unsigned(needs.cluster), grid[1], grid[2]},
                   {unsigned(needs.threads), 1, 1},
                   unsigned(needs.shared_bytes),
                   nullptr,
                   launch.attributes.data(),
                   unsigned(launch.attributes.size())};
  launch.kernel = std::move(kernel);
  steps_.emplace_back(std::move(launch));
}

PreparedCall::Launch& PreparedCall::last_launch() {
  if (steps_.empty() || !std::holds_alternative<Launch>(steps_.back()))
    throw std::logic_error("an argument must follow the launch that it belongs to");
  return std::get<Launch>(steps_.back());
}

PreparedCall::Slot& PreparedCall::slot(int number) {
  if (number < 0 || number > slots_)
    throw std::out_of_range("slot " + std::to_string(number) + " is none of 0 to " + std::to_string(slots_));
  return by_slot_[size_t(number)];
}

void PreparedCall::add_pointer(int number, int64_t offset) {
  Launch& launch = last_launch();
  Slot& from = slot(number);
  scalars_.emplace_back();
  launch.arguments.push_back(&scalars_.back());
  from.places.push_back({reinterpret_cast<Address*>(scalars_.back().bytes), nullptr, offset, steps_.size() - 1});
}

void PreparedCall::add_scalar(const void* value, size_t bytes) {
  Launch& launch = last_launch();
  if (bytes > sizeof(Scalar)) throw std::length_error("a scalar argument has at most 8 bytes");
  scalars_.emplace_back();
  std::memcpy(scalars_.back().bytes, value, bytes);
  launch.arguments.push_back(&scalars_.back());
}

void PreparedCall::add_tensor_map(int number, int64_t offset, MapShape shape) {
  Launch& launch = last_launch();
  Slot& from = slot(number);
  const size_t rank = shape.extents.size();
  if (rank < 1 || rank > 5 || shape.strides.size() != rank - 1 || shape.box.size() != rank ||
      shape.steps.size() != rank)
    throw std::length_error("a tensor map has one to five axes, a stride for each but the narrowest");
  maps_.emplace_back();
  maps_.back().shape = std::move(shape);
  launch.arguments.push_back(&maps_.back().map);
  from.places.push_back({nullptr, &maps_.back(), offset, steps_.size() - 1});
}

void PreparedCall::add_zeros(int number, int64_t offset, size_t bytes) {
  Slot& to = slot(number);
  steps_.emplace_back(Zeros{0, bytes});
  to.places.push_back({&std::get<Zeros>(steps_.back()).address, nullptr, offset, steps_.size() - 1});
}

void PreparedCall::run(const Address* addresses, void* stream, Address workspace) {
  const std::lock_guard lock(mutex_);
  if (!driver_) driver_ = &Driver::open(driver_path_);
  if (!context_) driver_->check(driver_->DevicePrimaryCtxRetain(&context_, device_), "primary context");
  const CurrentContext current(*driver_, context_);
  for (int number = 0; number < slots_; ++number) move(by_slot_[size_t(number)], addresses[number]);
  move(by_slot_[size_t(slots_)], workspace);
  for (auto& step : steps_) {
    if (Launch* launch = std::get_if<Launch>(&step)) {
      start(*launch, stream);
    } else {
      const Zeros& zeros = std::get<Zeros>(step);
      const Status status = driver_->MemsetD8Async(zeros.address, 0, zeros.bytes, stream);
      if (status) driver_->check(status, "zeros of '" + problem_ + "'");
    }
  }
}

void PreparedCall::move(Slot& slot, Address address) {
  if (slot.known && slot.address == address) return;
  slot.known = false;  // until all places have it
  for (const Place& place : slot.places) write(place, address + Address(place.offset));
  slot.address = address;
  slot.known = true;
}

void PreparedCall::write(const Place& place, Address address) {
  if (place.pointer) {
    *place.pointer = address;
    return;
  }
  Map& target = *place.map;
  const auto same = [address](const auto& one) { return one.first == address; };
  const auto found = std::find_if(target.known.begin(), target.known.end(), same);
  if (found != target.known.end()) {
    target.map = found->second;
    return;
  }
  target.map = map_at(target, address, place.step);
  if (target.known.size() < most_known_maps) {
    target.known.emplace_back(address, target.map);
  } else {
    target.known[target.oldest] = {address, target.map};
    target.oldest = (target.oldest + 1) % most_known_maps;
  }
}

// The tensor map of another address, made from a known one where there is one.
TensorMap PreparedCall::map_at(Map& map, Address address, size_t step) const {
  const MapShape& shape = map.shape;
  void* base = reinterpret_cast<void*>(address);
  TensorMap made{};
  if (!map.known.empty()) made = map.known.front().second;
  const Status status =
      !map.known.empty() ? driver_->TensorMapReplaceAddress(&made, base)
                         : driver_->TensorMapEncodeTiled(&made, shape.type, uint32_t(shape.extents.size()), base,
                                                         shape.extents.data(), shape.strides.data(), shape.box.data(),
                                                         shape.steps.data(), interleave_none, shape.swizzle,
                                                         promote_to_128_bytes, shape.fill);
  if (status) driver_->check(status, "tensor map at address " + std::to_string(address) + " for " + named(step));
  return made;
}

void PreparedCall::start(Launch& launch, void* stream) {
  if (!launch.function) launch.function = launch.kernel->on(*driver_, device_);
  launch.config.stream = stream;
  const Status status = driver_->LaunchKernelEx(&launch.config, launch.function, launch.arguments.data(), nullptr);
  if (status) driver_->check(status, "launch of kernel " + launch.kernel->name + " of '" + problem_ + "'");
}

std::string PreparedCall::named(size_t step) const {
  return "kernel " + std::get<Launch>(steps_[step]).kernel->name + " of '" + problem_ + "'";
}

}  // namespace convgrad::gpu

extern "C" int convgrad_run_prepared(void* call, void* const* addresses, void* stream, void* workspace, char* message,
                                     size_t message_bytes) {
  static_assert(sizeof(void*) == sizeof(convgrad::gpu::Address));
  try {
    static_cast<convgrad::gpu::PreparedCall*>(call)->run(
        reinterpret_cast<const convgrad::gpu::Address*>(addresses), stream,
        reinterpret_cast<convgrad::gpu::Address>(workspace));
    return 0;
  } catch (const std::exception& error) {
    if (message_bytes > 0) {
      const size_t length = std::min(message_bytes - 1, std::strlen(error.what()));
      std::memcpy(message, error.what(), length);
      message[length] = 0;
    }
    return 1;
  }
}
