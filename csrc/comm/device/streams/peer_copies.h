// The protocol `copy`: runs a direct plan (plan/direct_plan.h) whose steps only move bytes as
// copies between the ranks' arrays, which the device's copy engines carry out without a
// multiprocessor. The stream waits for the peers before and after them (stream_waits.h).
#pragma once

#include "comm/device/device_arrays.h"
#include "executor/device/device_launch.h"
#include "executor/device/device_program.h"

namespace pycoll {

/// Queues the copies of `launch`, which runs `program`. `places`: of its arrays.
void queue_peer_copies(const Device& device, const DeviceLaunch& launch,
                       const DeviceProgram& program, const DeviceArrays::Places& places,
                       DeviceStream stream);

}  // namespace pycoll
