#include "comm/device/device_introduction.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/environment.h"
#include "base/error.h"
#include "comm/device/device_blocks.h"
#include "executor/device/device_launch.h"

namespace pycoll {
namespace {

bool wants_cpu_links() { return env_text("PYCOLL_DEVICE_LINKS") == "cpu"; }

DeviceWaits wanted_waits() {
  const auto text = env_text("PYCOLL_DEVICE_WAITS");
  if (!text) return DeviceWaits::kAny;
  return *text == "streams" ? DeviceWaits::kStreams : DeviceWaits::kKernels;
}

}  // namespace

DeviceIntroduction introduce(const Device& device) {
  const DeviceFacts facts = device.facts();
  DeviceIntroduction mine;
  std::memcpy(mine.uuid, facts.uuid, sizeof(mine.uuid));
  mine.index = device.index();
  mine.max_channels = facts.max_channels;
  mine.max_blocks = facts.max_blocks;
  mine.wants_cpu = wants_cpu_links() ? 1 : 0;
  mine.taken_blocks = DeviceBlocks::taken(device.index());
  mine.takes_turns = facts.takes_turns;
  mine.has_word_ops = facts.has_word_ops;
  mine.waits = static_cast<int32_t>(wanted_waits());
  mine.process = static_cast<int64_t>(::getpid());
  device.check(device.table().max_resident_blocks(device.index(), facts.block_threads,
                                                  &mine.resident_blocks),
               "querying the number of resident blocks");
  return mine;
}

bool all_share(const std::vector<DeviceIntroduction>& all) {
  return std::all_of(all.begin(), all.end(),
                     [&](const DeviceIntroduction& one) { return one.same_device(all[0]); });
}

bool take_turns(const std::vector<DeviceIntroduction>& all) {
  for (const DeviceIntroduction& one : all) {
    for (const DeviceIntroduction& other : all) {
      if (one.takes_turns != 0 && one.same_device(other) && one.process != other.process) {
        return true;
      }
    }
  }
  return false;
}

std::string why_no_stream_waits(const std::vector<DeviceIntroduction>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].has_word_ops == 0) {
      return "the device of rank " + std::to_string(rank) + " has no stream memory operations";
    }
    for (size_t other = 0; other < rank; ++other) {
      if (all[rank].process == all[other].process && all[rank].same_device(all[other])) {
        return "ranks " + std::to_string(other) + " and " + std::to_string(rank) +
               " share a device in one process, where their streams may be the same";
      }
    }
  }
  return {};
}

DeviceWaits choose_waits(const std::vector<DeviceIntroduction>& all) {
  DeviceWaits wanted = DeviceWaits::kAny;
  for (const DeviceIntroduction& one : all) {
    const auto its = static_cast<DeviceWaits>(one.waits);
    if (its == DeviceWaits::kKernels) return its;
    if (its != DeviceWaits::kAny) wanted = its;
  }
  const std::string why = why_no_stream_waits(all);
  if (wanted == DeviceWaits::kStreams && !why.empty()) {
    throw UsageError("PYCOLL_DEVICE_WAITS=streams is not possible: " + why);
  }
  if (wanted != DeviceWaits::kAny) return wanted;
  return take_turns(all) && why.empty() ? DeviceWaits::kStreams : DeviceWaits::kKernels;
}

int channels_for(const std::vector<DeviceIntroduction>& all, const Device& device, bool threads) {
  const bool share = all_share(all);
  int channels = kMaxDeviceChannels;
  for (const DeviceIntroduction& one : all) {
    int sharing = 0;
    int taken = 0;
    for (const DeviceIntroduction& other : all) {
      if (!one.same_device(other)) continue;
      ++sharing;
      taken = threads ? std::max(taken, other.taken_blocks) : taken + other.taken_blocks;
    }
    // A cooperative launch of all ranks starts only when all its blocks fit.
    const bool alone = threads && sharing == static_cast<int>(all.size());
    int room = (one.resident_blocks - (alone ? 0 : taken)) / sharing;
    if (room < 1) {
      throw UsageError(std::to_string(sharing) + " ranks share one device (" + device.title() +
                       "), which holds " + std::to_string(one.resident_blocks) +
                       " blocks at once, of which other communicators have " +
                       std::to_string(taken) +
                       ": each rank needs one; use fewer ranks, or close a communicator");
    }
    if (!alone && room > 1) room /= 2;  // leaves blocks for further communicators
    const int share_of_memory = share ? one.max_blocks / static_cast<int>(all.size()) : 0;
    channels = std::min({channels, std::max(one.max_channels, share_of_memory), room});
  }
  return channels;
}

}  // namespace pycoll
