// What ranks tell each other of their devices before they make links, and what follows from it.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "device/device.h"

namespace pycoll {

struct DeviceIntroduction {
  char uuid[sizeof(DeviceFacts::uuid)] = {};
  int32_t index = 0;  // of the device in its process
  int32_t max_channels = 0;
  int32_t resident_blocks = 0;
  int32_t taken_blocks = 0;  // by other communicators of its process
  int32_t wants_host = 0;    // PYCOLL_DEVICE_LINKS=host
  uint64_t meeting = 0;      // a std::shared_ptr<DeviceMeeting>, of the first rank of a place

  bool same_device(const DeviceIntroduction& other) const {
    return std::strncmp(uuid, other.uuid, sizeof(uuid)) == 0;
  }
};

DeviceIntroduction introduce(const Device& device);

/// Blocks of each rank, so that those of all ranks on a device are resident together, beside those
/// of other communicators: a kernel waits for its peers, which must not wait for their place.
/// `threads`: the ranks are threads of one process. Raises UsageError when there is no room.
int channels_for(const std::vector<DeviceIntroduction>& all, const Device& device, bool threads);

}  // namespace pycoll
