// From a plan to what a device runs: the copies around a program become steps of it, and tiles are
// cut at 16-byte borders.
#pragma once

#include <string>
#include <vector>

#include "executor/device/device_launch.h"
#include "plan/plan.h"

namespace pycoll {

struct DeviceProgram {
  std::vector<Step> steps;
  std::vector<StepPlace> places;
  int max_link_messages = 0;  // per tile, on the busiest link of this rank: kPoison needs as many
                              // slots for each of its buffers
};

/// `plan.placement.before`, the program, `plan.placement.after`. A plan for a device is made
/// without multicast rings (PlanOptions::multicast = false).
DeviceProgram device_program(const Plan& plan);

/// Elements at whose multiples tiles are cut: as many as fill 16 bytes.
int32_t device_granule(size_t element_size);

/// Bytes of a message that fit a slot. kPoison, kSimple: all of it.
int64_t device_payload_bytes(DeviceProtocol protocol, int64_t slot_bytes, size_t element_size);

/// Elements of one block in one tile, so that the longest range of any step fits a slot's payload.
int64_t device_tile_count(const Plan& plan, int64_t payload_bytes, size_t element_size);

/// True when elements of this dtype, reduced with this op, never are all ones after they were
/// combined, and may be changed to another NaN before: what kPoison needs. The collective must be
/// all_reduce.
bool poison_allowed(DType dtype, Op op);


/// Fills in the plan's part: steps and places (inline, or `far_steps` and `far_places` in device
/// memory when there are more than kMaxInlineSteps), peers, positions.
void set_program(DeviceLaunch& launch, const Plan& plan, const DeviceProgram& program,
                 const Step* far_steps = nullptr, const StepPlace* far_places = nullptr);

}  // namespace pycoll
