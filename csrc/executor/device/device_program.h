// Converts a plan to a device's program: the copies around the program become steps of it, and
// tiles are cut at 16-byte borders.
#pragma once

#include <string>
#include <vector>

#include "executor/device/device_launch.h"
#include "plan/plan.h"

namespace pycoll {

struct DeviceProgram {
  std::vector<Step> steps;
  std::vector<StepPlace> places;
  int max_link_messages = 0;  // per tile, on this rank's busiest link: the number of slots that
                              // each buffer of kPoison needs
};

/// The copies of `plan.placement` and its program as one program. A plan for a
/// device is made without multicast rings and with phases (PlanOptions).
DeviceProgram device_program(const Plan& plan);

/// Number of elements that fill 16 bytes: tiles are cut at multiples of it.
int32_t device_granule(size_t element_size);

/// Bytes of a message that fit in a slot; for kPoison and kSimple the whole slot.
int64_t device_payload_bytes(DeviceProtocol protocol, int64_t slot_bytes, size_t element_size);

/// Elements of one block in one tile, so that the longest range of any step fits a slot's payload.
int64_t device_tile_count(const Plan& plan, int64_t payload_bytes, size_t element_size);

/// How a launch's payload is divided among the blocks of a rank.
struct DeviceCut {
  int32_t num_channels;
  int64_t tile_count;  // of DeviceLaunch
};
/// `count`: elements of a block of the collective; `payload_bytes`: of all its blocks. Tiles have
/// at most `max_tile_count` elements, but each of the blocks of threads gets a part.
DeviceCut device_cut(DeviceProtocol protocol, int64_t count, int64_t payload_bytes, int32_t granule,
                     int64_t max_tile_count, int max_channels);

/// True when kPoison can reduce this dtype with this op: a combined element never has all bits set,
/// and an input NaN that has may be replaced by another NaN. The collective must be all_reduce.
bool poison_allowed(DType dtype, Op op);

/// Fills in the plan's part: steps and places (inline, or `far_steps` and `far_places` in device
/// memory when there are more than kMaxInlineSteps), peers, positions.
void set_program(DeviceLaunch& launch, const Plan& plan, const DeviceProgram& program,
                 const Step* far_steps = nullptr, const StepPlace* far_places = nullptr);

}  // namespace pycoll
