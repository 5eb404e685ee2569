// The memory of a rank's links on a device: where every ring lies in the ranks' windows, and the
// tables that its kernels find them by.
#pragma once

#include <array>
#include <memory>

#include "executor/device/device_launch.h"
#include "transport/memory/device_window.h"

namespace pycoll {

/// What is fixed of the rings of a protocol, alike on all ranks.
struct DeviceRingShape {
  int num_slots = 0;  // 0: tails alone
  int64_t slot_bytes = 0;
};
DeviceRingShape device_ring_shape(DeviceProtocol protocol, int num_ranks);

class DeviceLinkMemory {
 public:
  /// Bytes of a window that holds one rank's links.
  static size_t window_bytes(int num_ranks, int num_channels);

  /// `window` was made of so many zeroed bytes per rank. Nobody uses the links before all ranks
  /// have made theirs.
  DeviceLinkMemory(const Device& device, const DeviceWindow& window, int rank, int num_ranks,
                   int num_channels);

  const DeviceLinks& links(DeviceProtocol protocol) const {
    return links_[static_cast<size_t>(protocol)];
  }
  int num_channels() const { return num_channels_; }
  /// For the member of that name of a launch.
  uint64_t* failed_word() const { return failed_; }

 private:
  int num_channels_;
  DeviceMemory tables_;
  std::array<DeviceLinks, kNumDeviceProtocols> links_;
  uint64_t* failed_ = nullptr;
};

}  // namespace pycoll
