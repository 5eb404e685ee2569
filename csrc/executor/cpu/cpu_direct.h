// direct: the protocol without slots. A step reads and writes the ranks' own buffers, whose
// addresses come from the exchange (buffer_exchange.h); no message has its own flag.
#pragma once

#include "executor/cpu/cpu_target.h"

namespace pycoll {

struct Direct {
  static bool run(CpuTarget& target, const ProgramView& program, const OneStep& phase) {
    return target.combine_in_place(program, phase.operands);
  }

  /// The second half of a plan with Writes::kOwnOnly (plan/direct_plan.h).
  struct Results {
    static bool run(CpuTarget& target, const ProgramView& program, const OneStep& phase) {
      return target.read_result(program, phase.operands);
    }
  };

  /// Bytes of a chunk range that are read from another process at a time before they are combined:
  /// few enough to stay in L2 together with the other operands.
  static constexpr int64_t kStageBytes = 128 << 10;
};

}  // namespace pycoll
