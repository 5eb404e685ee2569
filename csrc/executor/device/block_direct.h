// BlockDirect: the protocol without slots, for a team of a device's threads. A step reads the
// peers' inputs and writes the peers' outputs where they lie.
#pragma once

#include "executor/device/block.h"

namespace pycoll {

struct BlockDirect {
  template <class Target>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program,
                            const StepOperands& operands) {
    const DeviceLaunch& launch = target.launch();
    const StepPlace& place = program.places[operands.index];
    const auto element_size = static_cast<int64_t>(target.element_size());
    const auto offset = [&](BufferKind buffer, int32_t index) {
      const int64_t* table = launch.starts[static_cast<int>(buffer)];
      const int64_t start = table == nullptr ? index * launch.count : table[index];
      return (start + operands.offset) * element_size;
    };
    target.share_operands(
        program, operands,
        [&](int peer) {
          return launch.peer_inputs[peer] + launch.input_offset +
                 offset(BufferKind::kInput, place.peer_src_index);
        },
        [&](int peer) {
          return launch.peer_outputs[peer] + launch.output_offset +
                 offset(BufferKind::kOutput, place.peer_dst_index);
        });
    target.sync();
    target.combine(operands);
    target.sync();  // every thread has read these operands' places
    return true;
  }

  /// Announces to all peers that this rank's buffers may be used, or that it is done with theirs,
  /// and waits for the same from every peer. Sends a message without bytes on each link.
  template <class Target>
  PYCOLL_HD static bool meet(Target& target, const ProgramView& program, int step) {
    target.sync();
    const uint64_t all = ~uint64_t{0};
    auto& links = target.links();
    const bool came = target.for_own_peers(program, all, [&](int peer) {
      links.send[peer].post(target.digest());
      return true;
    }) && target.for_own_peers(program, all, [&](int peer) {
      device::BlockRecvEnd& link = links.recv[peer];
      if (!target.spin_until([&link] { return link.has_full_slot(); }, {peer, step})) return false;
      const bool same = link.mark() == target.digest();
      link.release_in_band();
      return same || target.mismatch(peer, step);
    });
    return target.agree(came);
  }
};

}  // namespace pycoll
