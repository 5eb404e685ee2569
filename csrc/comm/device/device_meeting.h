// Where ranks of one process meet that share a device: their parts of an operation become one
// cooperative launch, whose blocks are resident together. Kernels of their own might wait behind
// one another: a process has few hardware queues, and ranks may even use the same stream.
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

  /// Every member calls this for the same operation. Returns when all have and the launch is behind
  /// what each stream had got; false when the wait for a member failed.
  bool launch(int rank, const DeviceLaunch& launch, DeviceStream stream, Waiter& waiter);

 private:
  struct Member {
    int rank;
    StreamEvent ready;
    DeviceLaunch launch;
  };
  bool launch_all(Waiter& waiter);

  Device device_;
  Stream stream_;
  StreamEvent over_;
  DeviceMemory launches_;  // of all members
  std::vector<DeviceLaunch> staged_;
  std::mutex mutex_;
  std::vector<Member> members_;
  size_t num_arrived_ = 0;
  uint64_t round_ = 0;     // in which members arrive now
  uint64_t launched_ = 0;  // rounds: atomic
  uint64_t failed_ = 0;    // a launch did not work: atomic
};

}  // namespace pycoll
