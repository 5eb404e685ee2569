// The plans of a call. The place of the ranks' arrays decides which one runs.
#pragma once

#include <cstdint>
#include <vector>

#include "base/protocol_kind.h"
#include "comm/tuning/tuned_plans.h"
#include "executor/cpu/buffer_exchange.h"
#include "plan/direct_plan.h"

namespace pycoll {

/// A plan with its protocol and its measurements.
struct PlannedCall {
  Plan plan;
  Plan results;              // direct with Writes::kOwnOnly: runs once all ranks have run `plan`
  bool has_results = false;  // on some rank
  ProtocolKind protocol = ProtocolKind::kSimple;
  bool claims_few_slots = false;  // through slots: as Runner::slot_use_of says
  std::vector<BufferRef> given;   // direct: what peers read and write here, for the ledger
  bool in_place_allowed = true;   // input and output may be the same memory
  bool has_sole_readers = false;  // direct: of what peers read here
  PeerLoads::Claims claims;       // direct: whether owners write their arrays between calls
  uint16_t name_id = 0;    // of algorithm/protocol in this rank's records; 0: not written yet
  uint32_t name_hash = 0;  // of the name and all ranks' programs; equal on all ranks
  int64_t num_calls = 0;
  double measured_s = 0;  // running mean of the timed calls; 0: none yet
};

/// What direct plans that reach arrays so may write.
inline Writes writes_of(Reach reach) {
  return writes_of(reach == Reach::kProcess ? Arrays::kPlain : Arrays::kMapped);
}

struct CallPlan {
  /// The plan through slots, which works for all arrays.
  PlannedCall* slots = nullptr;
  /// Plans by reach, and by whether some rank's input is its output. Null: the call named a
  /// protocol that such arrays do not allow. All equal `slots` if no array allows a direct plan.
  PlannedCall* at[kNumReaches][2] = {};
  bool exchanges_buffers = false;  // a plan is direct, so the ranks exchange their arrays' places
  bool uses_processes = false;     // a plan is direct through the kernel (Reach::kProcess)
  bool copies_arrays = false;      // plain arrays are copied to where peers access them
  int64_t num_calls = 0;
  /// Plans for plain arrays, of which calls find the fastest. If there are none, `at` decides.
  TunedPlans tuned;

  PlannedCall* of(Reach reach, bool in_place) const {
    return at[static_cast<size_t>(reach)][in_place ? 1 : 0];
  }
};

}  // namespace pycoll
