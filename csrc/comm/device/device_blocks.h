// Counts the resident blocks of a device that communicators of this process use.
//
// Kernels of two communicators may run at the same time, each with blocks that wait for peers. All
// of these blocks must be resident: a resident block may wait for one that is not.
#pragma once

namespace pycoll {

/// A communicator's share of a device's blocks, released with this object.
class DeviceBlocks {
 public:
  DeviceBlocks(int device, int num_blocks);
  DeviceBlocks(const DeviceBlocks&) = delete;
  ~DeviceBlocks();

  /// Blocks of `device` taken by all existing objects.
  static int taken(int device);

 private:
  int device_;
  int num_blocks_;
};

}  // namespace pycoll
