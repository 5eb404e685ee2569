// Runs operations on device arrays of ranks on several hosts: through pinned CPU memory, in parts.
// While one part crosses the network, the next is fetched and the previous one is delivered.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/device/staging/call_parts.h"
#include "device/device.h"

namespace pycoll {

class CpuStaging {
 public:
  CpuStaging(const Device& device, int rank, int num_ranks);
  ~CpuStaging();  // waits for its copies

  const Device& device() const { return device_; }

  /// Runs `call` behind `begun`: calls `perform` once for each part, with the call on CPU arrays.
  /// Later work on `call.stream` is behind the operation. `wait` waits for a device event. Raises
  /// the errors of `wait` and `perform`, and CudaError; then no copy uses the call's arrays.
  void run(const Call& call, const StreamEvent& begun,
           const std::function<void(const StreamEvent&)>& wait,
           const std::function<void(const Call&)>& perform);

  /// The stream that copies results to the device.
  DeviceStream delivering() const { return up_.get(); }
  /// An event behind all deliveries so far.
  StreamEvent& over() { return over_; }

 private:
  /// CPU memory of a part, and the events of its copies.
  struct Slot {
    explicit Slot(const Device& device) : fetched(device), delivered(device) {}
    PinnedMemory input, output;
    size_t input_bytes = 0, output_bytes = 0;
    StreamEvent fetched, delivered;
    bool used = false;
  };

  void run_parts(const Call& call, const std::function<void(const StreamEvent&)>& wait,
                 const std::function<void(const Call&)>& perform);
  void finish_copies() const;
  void fetch(const Call& call, CallPart part, Slot& slot);
  void deliver(const Call& call, CallPart part, Slot& slot);
  Call cpu_call(const Call& call, CallPart part, const Slot& slot) const;
  void make_room(const Call& call, CallPart part, Slot& slot);

  const Device device_;
  const int rank_;
  const int num_ranks_;
  Stream down_, up_;
  StreamEvent over_;
  std::vector<Slot> slots_;
};

}  // namespace pycoll
