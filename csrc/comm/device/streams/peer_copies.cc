#include "comm/device/streams/peer_copies.h"

#include <algorithm>
#include <bit>

#include "executor/interpret.h"

namespace pycoll {
namespace {

/// The interpreter's target on the CPU: queues a copy where other targets move bytes.
class CopyTarget {
 public:
  static constexpr bool kRunsPhases = false;  // a stream runs the copies one after another

  CopyTarget(const Device& device, const DeviceLaunch& launch, const DeviceArrays::Places& places,
             DeviceStream stream)
      : device_(device), launch_(launch), places_(places), stream_(stream) {}

  size_t element_size() const { return dtype_size(launch_.dtype); }

  void run(const ProgramView& program, const StepOperands& operands) const {
    const Step& step = *operands.step;
    const StepPlace& place = program.places[operands.index];
    const auto size = static_cast<int64_t>(element_size());
    const auto offset = [&](int32_t index) {
      return (index * launch_.count + operands.offset) * size;
    };
    const auto peer_of = [&](uint64_t mask) { return program.peers[std::countr_zero(mask)]; };
    const std::byte* src = operands.local_src;
    if (step.src_peers != 0) {  // one: the schedule does not reduce
      src = places_.input_window->at(peer_of(step.src_peers)) + launch_.input_offset +
            offset(place.peer_src_index);
    }
    const auto nbytes = static_cast<size_t>(operands.count * size);
    if (operands.local_dst != nullptr) device_.copy(operands.local_dst, src, nbytes, stream_);
    for (uint64_t left = step.dst_peers; left != 0; left &= left - 1) {
      device_.copy(places_.output_window->at(peer_of(left)) + launch_.output_offset +
                       offset(place.peer_dst_index),
                   src, nbytes, stream_);
    }
  }

 private:
  const Device& device_;
  const DeviceLaunch& launch_;
  const DeviceArrays::Places& places_;
  DeviceStream stream_;
};

struct PeerCopies {
  static bool run(CopyTarget& target, const ProgramView& program, const OneStep& phase) {
    target.run(program, phase.operands);
    return true;
  }
};

}  // namespace

void queue_peer_copies(const Device& device, const DeviceLaunch& launch,
                       const DeviceProgram& program, const DeviceArrays::Places& places,
                       DeviceStream stream) {
  const ProgramView view{program.steps.data(), program.places.data(), launch.num_steps,
                         launch.num_pieces,    launch.peers,          launch.self_position};
  Payload payload;
  std::copy(std::begin(launch.buffers), std::end(launch.buffers), payload.buffers);
  payload.count = payload.tile_count = launch.count;
  payload.granule = launch.granule;
  CopyTarget target(device, launch, places, stream);
  interpret<PeerCopies>(target, view, payload);
}

}  // namespace pycoll
