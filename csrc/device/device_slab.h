// Small tables in device memory: an allocation of its own would take 2 MiB for each.
#pragma once

#include <algorithm>
#include <vector>

#include "device/device.h"

namespace pycoll {

/// Device memory for tables that live as long as the slab.
class DeviceSlab {
 public:
  explicit DeviceSlab(const Device& device) : device_(device) {}

  /// Copies `nbytes` bytes to the device, and returns their address there, which is a multiple of
  /// kAlignment. Not while a stream is captured. Raises CudaError.
  std::byte* put(const void* bytes, size_t nbytes) {
    if (chunks_.empty() || nbytes > chunks_.back().nbytes() - used_) {
      chunks_.emplace_back(device_, std::max(nbytes, kChunkBytes));
      used_ = 0;
    }
    const DeviceMemory& chunk = chunks_.back();
    std::byte* const at = chunk.data() + used_;
    device_.copy_now(at, bytes, nbytes);
    used_ = std::min((used_ + nbytes + kAlignment - 1) / kAlignment * kAlignment, chunk.nbytes());
    return at;
  }

 private:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kChunkBytes = 2 << 20;

  Device device_;
  std::vector<DeviceMemory> chunks_;
  size_t used_ = 0;  // of the last chunk
};

}  // namespace pycoll
