// Operations on arrays of a device whose ranks are on several hosts: through pinned host memory, in
// parts. While one part crosses the network, the next is fetched and the one before is delivered.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/call.h"
#include "device/device.h"

namespace pycoll {

class HostStaging {
 public:
  HostStaging(const Device& device, int rank, int num_ranks);
  ~HostStaging();  // waits for its copies

  const Device& device() const { return device_; }

  /// Runs `call` by `perform`, which gets the same call on host arrays, once for each part. Behind
  /// `begun`; what `call.stream` gets afterwards is behind the operation. `wait` waits for an event
  /// of the device. Raises as both do, and CudaError.
  void run(const Call& call, const StreamEvent& begun,
           const std::function<void(const StreamEvent&)>& wait,
           const std::function<void(const Call&)>& perform);

  /// Where results go to the device.
  DeviceStream delivering() const { return up_.get(); }
  /// Behind all that was delivered so far.
  StreamEvent& over() { return over_; }

 private:
  /// Where a part is on the host, and how far it has got.
  struct Slot {
    explicit Slot(const Device& device) : fetched(device), delivered(device) {}
    PinnedMemory input, output;
    size_t input_bytes = 0, output_bytes = 0;
    StreamEvent fetched, delivered;
    bool used = false;
  };

  /// Elements [begin, begin + count) of each block of a buffer, or all of one that has no parts.
  struct Part {
    int64_t begin, count;
  };

  void fetch(const Call& call, Part part, Slot& slot);
  void deliver(const Call& call, Part part, Slot& slot);
  Call host_call(const Call& call, Part part, const Slot& slot) const;
  void make_room(const Call& call, Part part, Slot& slot);
  template <class Copy>
  void for_each_block(const Call& call, Part part, int64_t total, const Copy& copy) const;

  const Device device_;
  const int rank_;
  const int num_ranks_;
  Stream down_, up_;
  StreamEvent over_;
  std::vector<Slot> slots_;
};

}  // namespace pycoll
