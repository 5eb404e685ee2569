// Facts about their devices that ranks exchange before they make links.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "device/device.h"

namespace pycoll {

/// How operations wait for peers that access each other's arrays.
enum class DeviceWaits : int32_t {
  kAny,
  kKernels,  // kernels poll
  kStreams,  // streams wait for words (stream_waits.h)
};

struct DeviceIntroduction {
  char uuid[sizeof(DeviceFacts::uuid)] = {};
  int32_t index = 0;  // number of the device in its process
  int32_t max_channels = 0;
  int32_t max_blocks = 0;
  int32_t resident_blocks = 0;
  int32_t taken_blocks = 0;  // by other communicators of its process
  int32_t wants_cpu = 0;     // PYCOLL_DEVICE_LINKS=cpu
  int32_t takes_turns = 0;   // DeviceFacts::takes_turns
  int32_t has_word_ops = 0;  // DeviceFacts::has_word_ops
  int32_t waits = 0;         // a DeviceWaits: what PYCOLL_DEVICE_WAITS asks for
  int64_t process = 0;       // its number
  uint64_t meeting = 0;      // pointer to the leader's std::shared_ptr<DeviceMeeting>

  bool same_device(const DeviceIntroduction& other) const {
    return std::strncmp(uuid, other.uuid, sizeof(uuid)) == 0;
  }
};

DeviceIntroduction introduce(const Device& device);

/// True when all ranks' kernels run on one device.
bool all_share(const std::vector<DeviceIntroduction>& all);

/// True when several processes share a device on which their kernels take turns: then a kernel
/// waits for a peer's for a whole time slice.
bool take_turns(const std::vector<DeviceIntroduction>& all);

/// Why streams of these ranks cannot wait for words; empty: they can. Identical on all ranks.
std::string why_no_stream_waits(const std::vector<DeviceIntroduction>& all);

/// Whether kKernels or kStreams: what a rank asks for, else kStreams where kernels take turns and
/// streams can wait. Raises UsageError on all ranks if a rank asks for the impossible.
DeviceWaits choose_waits(const std::vector<DeviceIntroduction>& all);

/// Returns the number of blocks of each rank for which the blocks of all ranks on a device, and of
/// other communicators, are resident together: a kernel waits for its peers, so these must run.
/// Ranks that all share one device are limited by its memory, others by their links.
/// `threads`: the ranks are threads of one process. Raises UsageError if not all of them fit.
int channels_for(const std::vector<DeviceIntroduction>& all, const Device& device, bool threads);

}  // namespace pycoll
