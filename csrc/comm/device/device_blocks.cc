#include "comm/device/device_blocks.h"

#include <map>
#include <mutex>

namespace pycoll {
namespace {

/// Blocks taken on each device by all communicators of this process.
struct Taken {
  std::mutex mutex;
  std::map<int, int> blocks;  // by device
};

Taken& all_taken() {
  static Taken taken;
  return taken;
}

void add(int device, int num_blocks) {
  Taken& taken = all_taken();
  const std::lock_guard lock(taken.mutex);
  taken.blocks[device] += num_blocks;
}

}  // namespace

DeviceBlocks::DeviceBlocks(int device, int num_blocks) : device_(device), num_blocks_(num_blocks) {
  add(device_, num_blocks_);
}

DeviceBlocks::~DeviceBlocks() { add(device_, -num_blocks_); }

int DeviceBlocks::taken(int device) {
  Taken& taken = all_taken();
  const std::lock_guard lock(taken.mutex);
  return taken.blocks[device];
}

}  // namespace pycoll
