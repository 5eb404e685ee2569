// The queues of a device through which streams of a process start their work.
#pragma once

#include <algorithm>
#include <cstdlib>

namespace pycoll {

/// CUDA's rule: CUDA_DEVICE_MAX_CONNECTIONS when the process begins to use the device.
inline int num_hardware_queues() {
  constexpr int kDefault = 8;
  constexpr int kMost = 32;
  const char* const text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return text == nullptr ? kDefault : std::clamp(std::atoi(text), 1, kMost);
}

}  // namespace pycoll
