// Finds the plan of a device call: the planner for CPU calls with a device's links and costs, and
// for each plan the common part of its launches.
#pragma once

#include <map>
#include <memory>

#include "comm/device/device_links.h"
#include "comm/planner.h"
#include "device/device_slab.h"
#include "executor/device/device_launch.h"
#include "executor/device/device_program.h"

namespace pycoll {

/// A plan in the form that a device runs.
struct DevicePlan {
  PlannedCall* planned = nullptr;
  DeviceProgram program;
  DeviceLaunch model;  // the members of a launch that depend on the plan only
  size_t num_scratch_blocks = 0;
};

class DevicePlanner {
 public:
  /// `waits_in_streams`: plans whose waits are in streams come first (DeviceWaits::kStreams).
  DevicePlanner(int rank, const DeviceRings& rings,
                const std::shared_ptr<const SelectionInputs>& inputs, DeviceSlab& slab,
                bool waits_in_streams);

  Planner& planner() { return planner_; }
  /// Returns the device plan of `planned`. `prepared`: allocates no memory, because the stream is
  /// being captured, and raises UsageError if a new plan needs memory.
  DevicePlan& of(PlannedCall& planned, bool prepared);

 private:
  DeviceSlab& slab_;  // has the steps and places of long programs
  int num_ranks_;
  Planner planner_;
  std::map<const PlannedCall*, DevicePlan> plans_;
};

}  // namespace pycoll
