// What a call runs, by where its arrays turn out to be.
#pragma once

#include <cstdint>
#include <vector>

#include "base/protocol_kind.h"
#include "executor/cpu/buffer_exchange.h"
#include "plan/direct_plan.h"

namespace pycoll {

/// A plan with its protocol, and what running it has shown.
struct PlannedCall {
  Plan plan;
  ProtocolKind protocol = ProtocolKind::kSimple;
  std::vector<BufferRef> given;  // direct: what peers take and get, for the ledger
  bool in_place_allowed = true;  // input and output may be the same memory
  uint16_t name_id = 0;          // of algorithm/protocol in this rank's records; 0: not written yet
  uint32_t name_hash = 0;        // the same for all ranks
  int64_t num_calls = 0;
  double measured_s = 0;  // running mean of the timed calls, 0 when there was none
};

struct CallPlan {
  /// What runs with arrays anywhere.
  PlannedCall* slots = nullptr;
  /// By reach, and whether some rank's input is its output. Null: the call named a protocol that
  /// such arrays do not allow. All are `slots` where no array makes a difference.
  PlannedCall* at[kNumReaches][2] = {};
  bool enters = false;          // some are direct: ranks tell each other where their arrays are
  bool uses_processes = false;  // some are, by the kernel
  int64_t num_calls = 0;

  PlannedCall* of(Reach reach, bool in_place) const {
    return at[static_cast<size_t>(reach)][in_place ? 1 : 0];
  }
};

}  // namespace pycoll
