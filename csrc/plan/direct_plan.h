// Direct plans: programs that read the peers' inputs and write the peers' outputs in place.
//
// A proved program needs no slots when every message is a pull or a push. In a pull, the bytes are
// the start value of the sender's chunks, so the receiver may read them in place. In a push, the
// receiver only stores the bytes, so the sender may write them in place. A message that could be
// either is moved by a sender that copies its chunks to its own output anyway, else by the rank
// with less to move. Steps that only send pulled messages or store pushed ones are left out. At the
// exchange all inputs are ready and all outputs may be written, so no rank waits between the
// exchange and the end of the operation.
//
// With Writes::kOwnOnly no rank writes a peer's memory: what would be pushed is written to the
// sender's own output, all ranks wait for all, and `results` reads it from there.
#pragma once

#include <optional>

#include "base/arrays.h"
#include "plan/plan.h"

namespace pycoll {

/// A range of this rank's buffers that peers read, or one of theirs that it writes.
struct BufferRef {
  int32_t block = 0;
  int32_t first_piece = 0;
  int32_t num_pieces = 0;
  int32_t num_peers = 0;
};

/// The memory that the ranks of a direct plan write.
enum class Writes : uint8_t { kPeers, kOwnOnly };

/// Memory of another process is read only, so that a rank that is late changes nothing in it.
inline Writes writes_of(Arrays arrays) {
  return arrays == Arrays::kPlain ? Writes::kOwnOnly : Writes::kPeers;
}

struct DirectPlan {
  Plan plan;
  // With Writes::kOwnOnly: the steps that read the peers' outputs, once all ranks have run `plan`.
  Plan results;
  bool has_results = false;      // some rank's `results` has steps
  std::vector<BufferRef> given;  // for the ledger
  // True when no rank reads what another one writes, even if inputs and outputs share memory.
  bool in_place_allowed = false;
  // True when each chunk of an input that another rank reads has no other reader, nor its owner.
  bool has_sole_readers = false;
};

/// The work of one rank in a direct plan, in blocks.
struct DirectWork {
  double remote = 0;     // read from peers or written to them
  double combined = 0;   // sources beyond the first
  int num_accesses = 0;  // ranges of peers that it reads or writes
};

/// Returns nothing when some message of the schedule is neither a pull nor a push, or with
/// Writes::kOwnOnly, when its sender has no place for it. Raises UsageError when the schedule is
/// not proved.
std::optional<DirectPlan> make_direct_plan(const Schedule& schedule, int rank,
                                           Writes writes = Writes::kPeers);

/// Work by rank, computed without a proof, to compare schedules. Empty when there is no plan.
std::vector<DirectWork> direct_work(const Schedule& schedule, Writes writes);

}  // namespace pycoll
