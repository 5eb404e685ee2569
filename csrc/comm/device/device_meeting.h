// Combines the kernels of ranks that are threads of one process and share a device: their parts of
// an operation become one cooperative launch, whose blocks are resident together. Separate kernels
// could be queued behind one another: a process has few hardware queues, and ranks may even use the
// same stream. The meeting sees the arrays of all members, so it fills in the tables of protocol
// direct for arrays that no rank has registered.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/device.h"
#include "executor/device/device_launch.h"
#include "executor/wait/wait.h"

namespace pycoll {

class DeviceMeeting {
 public:
  /// `members`: ranks, ascending.
  DeviceMeeting(const Device& device, std::vector<int> members);

  /// Called by every member for the same operation. Returns once all members have called it and the
  /// launch is queued behind the earlier work of their streams; false if the wait for a member
  /// failed.
  bool launch(int rank, const DeviceLaunch& launch, DeviceStream stream, Waiter& waiter);

  size_t num_members() const { return members_.size(); }

 private:
  struct Member {
    int rank;
    StreamEvent ready;
    DeviceLaunch launch;
    DeviceStream stream = nullptr;
  };
  /// Pinned memory that is copied to the device in front of a launch: the members' launches, their
  /// inputs and their outputs.
  struct Source {
    PinnedMemory memory;
    StreamEvent copied;
    bool is_used = false;
  };
  static constexpr size_t kNumSources = 4;

  bool launch_all(Waiter& waiter);
  /// Queues the common launch on `stream`. Raises CudaError.
  void queue(DeviceStream stream);

  Device device_;
  Stream stream_;
  StreamEvent over_;
  DeviceMemory launches_;  // the copy of a Source
  std::vector<Source> sources_;
  DeviceStream launched_on_ = nullptr;  // stream of the last launch
  std::mutex mutex_;
  std::vector<Member> members_;
  size_t num_arrived_ = 0;
  uint64_t round_ = 0;     // number of finished rounds; each operation is a round
  uint64_t launched_ = 0;  // atomic: number of launched rounds
  uint64_t failed_ = 0;    // atomic: 1 after a failed launch
};

}  // namespace pycoll
