#include "comm/device/device_planner.h"

#include "base/error.h"

namespace pycoll {
namespace {

/// Inputs for devices: the rules, but not the tuning table, which was measured with CPU memory.
std::shared_ptr<const SelectionInputs> without_table(
    const std::shared_ptr<const SelectionInputs>& inputs) {
  auto own = std::make_shared<SelectionInputs>();
  own->rules = inputs->rules;
  own->table_note = "none, tables are measured with CPU memory";
  return own;
}

DeviceProtocol protocol_of(ProtocolKind protocol) {
  switch (protocol) {
    case ProtocolKind::kSimple:
      return DeviceProtocol::kSimple;
    case ProtocolKind::kLL:
      return DeviceProtocol::kLL;
    case ProtocolKind::kDirect:
    case ProtocolKind::kCopy:  // by copies, in the form of a launch (peer_copies.h)
      return DeviceProtocol::kDirect;
    case ProtocolKind::kLL128:
      return DeviceProtocol::kLL128;
    case ProtocolKind::kPoison:
      return DeviceProtocol::kPoison;
  }
  return DeviceProtocol::kSimple;
}

Topology topology_of(int num_ranks, bool waits_in_streams) {
  Topology topology = device_topology(num_ranks);
  topology.waits_in_streams = waits_in_streams;
  return topology;
}

PlannerLinks device_links_of(const DeviceRings& rings) {
  PlannerLinks links;
  links.num_slots = kMaxSlots;
  links.multicast = false;
  links.phases = true;
  const auto payload = [&](DeviceProtocol protocol) {
    // Half of the payload: ranges are cut at granules, so one may be longer than its share.
    return device_payload_bytes(protocol, rings.shape(protocol).slot_bytes, 1) / 2;
  };
  for (const ProtocolKind protocol : device_protocols()) {
    links.slot_payloads[static_cast<size_t>(protocol)] = payload(protocol_of(protocol));
  }
  return links;
}

}  // namespace

DevicePlanner::DevicePlanner(int rank, const DeviceRings& rings,
                             const std::shared_ptr<const SelectionInputs>& inputs, DeviceSlab& slab,
                             bool waits_in_streams)
    : slab_(slab),
      num_ranks_(rings.num_ranks),
      planner_(Selector(topology_of(rings.num_ranks, waits_in_streams), without_table(inputs)),
               rank, device_links_of(rings)) {}

DevicePlan& DevicePlanner::of(PlannedCall& planned, bool prepared) {
  const auto found = plans_.find(&planned);
  if (found != plans_.end()) return found->second;
  DevicePlan plan;
  plan.planned = &planned;
  plan.program = device_program(planned.plan);
  const size_t num_steps = plan.program.steps.size();
  const Step* far_steps = nullptr;
  const StepPlace* far_places = nullptr;
  if (num_steps > static_cast<size_t>(kMaxInlineSteps)) {
    if (prepared) {
      throw UsageError(
          planned.plan.algorithm +
          ": its program needs device memory, which cannot be allocated while a stream is "
          "captured: call it once before the capture");
    }
    const size_t step_bytes = num_steps * sizeof(Step);
    const size_t place_bytes = num_steps * sizeof(StepPlace);
    far_steps = reinterpret_cast<const Step*>(slab_.put(plan.program.steps.data(), step_bytes));
    far_places =
        reinterpret_cast<const StepPlace*>(slab_.put(plan.program.places.data(), place_bytes));
  }
  plan.model.num_ranks = num_ranks_;
  set_program(plan.model, planned.plan, plan.program, far_steps, far_places);
  plan.model.protocol = protocol_of(planned.protocol);
  plan.num_scratch_blocks = planned.plan.placement.scratch.size();
  return plans_.emplace(&planned, std::move(plan)).first->second;
}

}  // namespace pycoll
