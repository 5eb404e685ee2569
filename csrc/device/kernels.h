// What a device library's kernels give to the part that owns its memory and streams. Defined beside
// the kernels, above this layer: a launch is so many bytes here.
#pragma once

#include <cstdint>

#include "device/table.h"

namespace pycoll {

/// sizeof(DeviceLaunch)
uint32_t device_launch_bytes();

// --- the emulated device ---

/// Runs the launches, each with its blocks as host threads, and returns when all are over.
/// `launches` are one after another in memory.
void run_on_host_threads(const DeviceLaunch* launches, int num_launches);

}  // namespace pycoll
