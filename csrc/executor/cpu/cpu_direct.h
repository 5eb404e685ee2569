// direct: the protocol without slots. A step reads and writes the ranks' own buffers, of which the
// exchange (exchange.h) told; no message has a flag of its own.
#pragma once

#include "executor/cpu/cpu_target.h"

namespace pycoll {

struct Direct {
  static bool run(CpuTarget& target, const ProgramView& program, const StepOperands& operands) {
    return target.combine_in_place(program, operands);
  }

  /// Bytes of one chunk range that are read from another process before they are combined: they
  /// stay in L2 together with what they are combined with.
  static constexpr int64_t kStageBytes = 128 << 10;
};

}  // namespace pycoll
