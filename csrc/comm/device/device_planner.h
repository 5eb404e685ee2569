// Finds what a call on a device runs: the planner of the host with a device's links and costs, and
// beside each plan what its launches have in common.
#pragma once

#include <map>
#include <memory>

#include "comm/planner.h"
#include "device/device.h"
#include "executor/device/device_launch.h"
#include "executor/device/device_program.h"

namespace pycoll {

/// A plan as a device runs it.
struct DevicePlan {
  PlannedCall* planned = nullptr;
  DeviceProgram program;
  DeviceLaunch model;  // all of a launch that its plan decides
  DeviceMemory far;    // steps and places of a long program
  size_t num_scratch_blocks = 0;
};

class DevicePlanner {
 public:
  DevicePlanner(const Device& device, int rank, int num_ranks,
                const std::shared_ptr<const SelectionInputs>& inputs);

  Planner& planner() { return planner_; }
  /// `prepared`: only what is there already, since memory for a new one cannot be had now. Raises
  /// UsageError when it is not there.
  DevicePlan& of(PlannedCall& planned, bool prepared);

 private:
  Device device_;
  int num_ranks_;
  Planner planner_;
  std::map<const PlannedCall*, DevicePlan> plans_;
};

}  // namespace pycoll
