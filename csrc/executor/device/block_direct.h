// BlockDirect: the protocol without slots, for a team of a device's threads. A phase reads the
// peers' inputs and writes the peers' outputs where they lie.
#pragma once

#include "executor/device/block.h"

namespace pycoll {

struct BlockDirect {
  template <class Target, class Phase>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program, const Phase& phase) {
    const DeviceLaunch& launch = target.launch();
    const auto element_size = static_cast<int64_t>(target.element_size());
    const auto offset = [&](BufferKind buffer, int32_t index, const StepOperands& operands) {
      const int64_t* table = launch.starts[static_cast<int>(buffer)];
      const int64_t start = table == nullptr ? index * launch.count : table[index];
      return (start + operands.offset) * element_size;
    };
    target.share_operands(
        program, phase,
        [&](int peer, const StepOperands& operands) {
          const int32_t index = program.places[operands.index].peer_src_index;
          return launch.peer_inputs[peer] + launch.input_offset +
                 offset(BufferKind::kInput, index, operands);
        },
        [&](int peer, const StepOperands& operands) {
          const int32_t index = program.places[operands.index].peer_dst_index;
          return launch.peer_outputs[peer] + launch.output_offset +
                 offset(BufferKind::kOutput, index, operands);
        });
    target.sync();
    target.combine(phase);
    target.sync();  // every thread has read these operands' places
    return true;
  }

  /// Announces to all peers that this rank's buffers may be used, or that it is done with theirs,
  /// and waits for the same from every peer. Sends a message without bytes on each link.
  template <class Target>
  PYCOLL_HD static bool meet(Target& target, const ProgramView& program, int step) {
    target.sync();
    auto& links = target.links();
    const bool came = target.for_own_peers(program, [&](int peer) {
      links.send[peer].post(target.digest());
      return true;
    }) && target.for_own_peers(program, [&](int peer) {
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
