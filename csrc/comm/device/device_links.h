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
DeviceRingShape device_ring_shape(DeviceProtocol protocol, int num_ranks);

class DeviceLinkMemory {
 public:
  /// Bytes of a window that holds one rank's links.
  static size_t window_bytes(int num_ranks, int num_channels);

  /// `window` has window_bytes() zeroed bytes per rank. No rank may use the links before all ranks
  /// have made theirs.
  DeviceLinkMemory(const Device& device, const DeviceWindow& window, int rank, int num_ranks,
                   int num_channels);

  const DeviceLinks& links(DeviceProtocol protocol) const {
    return links_[static_cast<size_t>(protocol)];
  }
  int num_channels() const { return num_channels_; }
  /// Value for DeviceLaunch::failed.
  uint64_t* failed_word() const { return failed_; }

 private:
  int num_channels_;
  DeviceMemory tables_;
  std::array<DeviceLinks, kNumDeviceProtocols> links_;
  uint64_t* failed_ = nullptr;
};

}  // namespace pycoll
