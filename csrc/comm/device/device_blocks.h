// Blocks of a device that communicators of this process may have resident at once.
//
// Kernels of two communicators may run beside each other, each with blocks that wait for peers. All
// of them must be resident: a block that waits for its place may be the one that another waits for.
#pragma once

namespace pycoll {

/// A communicator's share, given back with this object.
class DeviceBlocks {
 public:
  DeviceBlocks(int device, int num_blocks);
  DeviceBlocks(const DeviceBlocks&) = delete;
  ~DeviceBlocks();

  /// Of `device`, by all that live.
  static int taken(int device);

 private:
  int device_;
  int num_blocks_;
};

}  // namespace pycoll
