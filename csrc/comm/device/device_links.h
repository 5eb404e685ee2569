// The memory of a rank's links on a device: the layout of the rings in the ranks' windows, and the
// tables with which its kernels find them.
#pragma once

#include <array>
#include <memory>

#include "executor/device/device_launch.h"
#include "transport/memory/device_window.h"

namespace pycoll {

/// Size of the rings of a protocol; identical on all ranks.
struct DeviceRingShape {
  int num_slots = 0;  // 0: tails only
  int64_t slot_bytes = 0;
};

/// The rings of all ranks; identical on all ranks.
struct DeviceRings {
  int num_ranks = 1;
  int num_channels = 1;
  // Size of the cache of the device that all ranks share; 0: they use several devices.
  int64_t cache_bytes = 0;

  DeviceRingShape shape(DeviceProtocol protocol) const;
};

class DeviceLinkMemory {
 public:
  /// Bytes of a window that holds one rank's links.
  static size_t window_bytes(const DeviceRings& rings);

  /// `window` has window_bytes() zeroed bytes per rank. No rank may use the links before all ranks
  /// have made theirs.
  DeviceLinkMemory(const Device& device, const DeviceWindow& window, int rank,
                   const DeviceRings& rings);

  const DeviceLinks& links(DeviceProtocol protocol) const {
    return links_[static_cast<size_t>(protocol)];
  }
  int num_channels() const { return rings_.num_channels; }
  /// Value for DeviceLaunch::failed.
  uint64_t* failed_word() const { return failed_; }

 private:
  DeviceRings rings_;
  DeviceMemory tables_;
  std::array<DeviceLinks, kNumDeviceProtocols> links_;
  uint64_t* failed_ = nullptr;
};

}  // namespace pycoll
