#include "executor/device/device_program.h"

#include <algorithm>
#include <bit>

#include "reduce/cells.h"

namespace pycoll {
namespace {

// Smallest amount of work that is worth another block of threads: where a thread moves several
// packs at a time, and where it waits for each line, which it has a round trip for. A line of kLL
// has 8 bytes of payload, so this is one line for each of kMaxDeviceThreads.
constexpr int64_t kChannelBytes = 32 << 10;
constexpr int64_t kRoundBytes = int64_t{8} * kMaxDeviceThreads;

/// Adds copies of whole blocks, as steps without peers. No two have the same block: they are
/// independent.
void add_copies(DeviceProgram& program, const std::vector<BlockCopy>& copies, int32_t num_pieces) {
  for (size_t i = 0; i < copies.size(); ++i) {
    const BlockCopy& copy = copies[i];
    Step step;
    step.num_chunks = num_pieces;
    step.flags = kReadLocal | kWriteLocal | (i % kMaxPhaseSteps == 0 ? 0 : kSamePhase);
    StepPlace place;
    place.block = copy.block;
    place.src = copy.from;
    place.src_index = copy.from_index;
    place.dst = copy.to;
    place.dst_index = copy.to_index;
    program.steps.push_back(step);
    program.places.push_back(place);
  }
}

}  // namespace

DeviceProgram device_program(const Plan& plan) {
  DeviceProgram program;
  const int32_t num_pieces = plan.placement.num_pieces;
  add_copies(program, plan.placement.before, num_pieces);
  add_copies(program, plan.placement.any_time, num_pieces);
  program.steps.insert(program.steps.end(), plan.program.steps.begin(), plan.program.steps.end());
  program.places.insert(program.places.end(), plan.placement.steps.begin(),
                        plan.placement.steps.end());
  add_copies(program, plan.placement.after, num_pieces);
  for (size_t i = 0; i < plan.program.peers.size(); ++i) {
    int sent = 0;
    int received = 0;
    for (const Step& step : program.steps) {
      sent += static_cast<int>(step.dst_peers >> i & 1);
      received += static_cast<int>(step.src_peers >> i & 1);
    }
    program.max_link_messages = std::max({program.max_link_messages, sent, received});
  }
  return program;
}

int32_t device_granule(size_t element_size) {
  return element_size >= 16 ? 1 : static_cast<int32_t>(16 / element_size);
}

int64_t device_payload_bytes(DeviceProtocol protocol, int64_t slot_bytes, size_t element_size) {
  switch (protocol) {
    case DeviceProtocol::kLL:
      return slot_bytes / 2;
    case DeviceProtocol::kLL128:
      return slot_bytes / 128 * static_cast<int64_t>(120 / element_size * element_size);
    default:
      return slot_bytes;
  }
}

int64_t device_tile_count(const Plan& plan, int64_t payload_bytes, size_t element_size) {
  // A range of k of the C pieces of a block of g granules has at most ceil(k * g / C) of them.
  const int64_t granule = device_granule(element_size);
  const int64_t num_pieces = plan.placement.num_pieces;
  const int64_t max_range = std::max(plan.program.max_range, 1);
  const int64_t granules = payload_bytes / static_cast<int64_t>(element_size) / granule;
  const int64_t of_piece = granules / max_range;
  return (of_piece > 0 ? of_piece * num_pieces : granules * num_pieces / max_range) * granule;
}

DeviceCut device_cut(DeviceProtocol protocol, int64_t count, int64_t payload_bytes, int32_t granule,
                     int64_t max_tile_count, int max_channels) {
  const bool in_one_round = protocol == DeviceProtocol::kLL || protocol == DeviceProtocol::kPoison;
  const int64_t channel_bytes = in_one_round ? kRoundBytes : kChannelBytes;
  int64_t wanted = (payload_bytes + channel_bytes - 1) / channel_bytes;
  if (protocol == DeviceProtocol::kPoison) {  // one tile for each block of threads
    wanted = std::max(wanted, (count + max_tile_count - 1) / max_tile_count);
  }
  DeviceCut cut;
  cut.num_channels = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, max_channels));
  const int64_t part = (count + cut.num_channels - 1) / cut.num_channels;
  const int64_t granules = (part + granule - 1) / granule;
  cut.tile_count = std::min(max_tile_count, std::max<int64_t>(granules, 1) * granule);
  return cut;
}

bool poison_allowed(DType dtype, Op op) {
  if (dtype == DType::kOpaque || !supported(dtype, op)) return false;
  // In f8_e4m3 all bits set is also the result of a negative overflow.
  const DTypeKind kind = dtype_kind(dtype);
  return (kind == DTypeKind::kFloat || kind == DTypeKind::kComplex) && dtype != DType::kF8E4M3;
}

void set_program(DeviceLaunch& launch, const Plan& plan, const DeviceProgram& program,
                 const Step* far_steps, const StepPlace* far_places) {
  launch.num_steps = static_cast<int32_t>(program.steps.size());
  launch.num_pieces = plan.placement.num_pieces;
  launch.num_peers = static_cast<int32_t>(plan.program.peers.size());
  launch.self_position = plan.program.self_position;
  launch.rank = plan.program.rank;
  launch.num_ranks = plan.program.num_ranks;
  std::copy(plan.program.peers.begin(), plan.program.peers.end(), launch.peers);
  launch.steps = far_steps;
  launch.places = far_places;
  if (program.steps.size() <= kMaxInlineSteps) {
    launch.steps = nullptr;
    launch.places = nullptr;
    std::copy(program.steps.begin(), program.steps.end(), launch.inline_steps);
    std::copy(program.places.begin(), program.places.end(), launch.inline_places);
  }
}

}  // namespace pycoll
