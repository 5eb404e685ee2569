// Direct plans: programs that read the peers' inputs and write the peers' outputs in place.
//
// A proved program needs no slots when every message is one of two kinds. Its bytes are the start
// value of the sender's chunks: then the receiver may read them where they lie (a pull). Or the
// receiver only stores them: then the sender may write them where they go (a push). Steps that do
// nothing but send what is pulled, or store what is pushed, are left out; nobody waits for anybody
// between the exchange and the end of the operation, when all inputs are there and all outputs may
// be written.
#pragma once

#include <optional>

#include "plan/plan.h"

namespace pycoll {

/// A range that peers take from this rank, or that it gives them.
struct BufferRef {
  int32_t block = 0;
  int32_t first_piece = 0;
  int32_t num_pieces = 0;
  int32_t num_peers = 0;
};

struct DirectPlan {
  Plan plan;
  std::vector<BufferRef> given;  // for the ledger
  // No rank reads what another one writes, even where inputs and outputs are the same memory.
  bool in_place_allowed = false;
};

/// What one rank does in a direct plan, in blocks.
struct DirectWork {
  double remote = 0;     // read from peers or written to them
  double combined = 0;   // sources beyond the first
  int num_accesses = 0;  // ranges of peers
};

/// Nothing when some message of the schedule is of neither kind. Raises UsageError when the
/// schedule is not proved.
std::optional<DirectPlan> make_direct_plan(const Schedule& schedule, int rank);

/// By rank, without a proof: what a choice between schedules goes by. Empty when there is no plan.
std::vector<DirectWork> direct_work(const Schedule& schedule);

}  // namespace pycoll
