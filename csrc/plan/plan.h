// A plan: a proved program and everything else that all calls share. It holds no byte sizes of
// messages and no pointers into them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/place.h"
#include "schedule/expressions.h"
#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

struct Plan {
  Collective collective = Collective::kAllReduce;
  std::string algorithm;
  Program program;      // of this rank
  Placement placement;  // of its local chunks
  int min_slots = 0;    // proved; the transport's links have at least as many
  // If there are two ranks, which send each other equally many messages in each tile: the most that
  // one has sent beyond those it has read, with that of the same step. Else 0.
  int trade_depth = 0;
  int64_t num_rings = 0;        // that carry messages, of all ranks
  Order order = Order::kOther;  // proved, of its reductions
  bool spans_blocks = false;    // a range of some rank holds several blocks: payloads of one tile
  uint64_t programs_hash = 0;   // hash_programs() of all ranks' programs

  /// Valid as long as the plan lives and is not changed.
  ProgramView view() const {
    return {
        program.steps.data(), placement.steps.data(), static_cast<int32_t>(program.steps.size()),
        placement.num_pieces, program.peers.data(),   program.self_position};
  }
};

struct PlanOptions {
  int num_slots = 8;        // of the transport's links
  bool multicast = true;    // the transport has links with one slot and many readers
  bool join_blocks = true;  // a range may span blocks: for payloads of one tile
  bool join_chunks = true;  // a range may hold several chunks
  bool phases = false;      // independent steps are marked as phases, for teams of threads
};

/// Lowers, proves and places `schedule`.
/// Raises UsageError when no proof is found: such a schedule is never run.
Plan make_plan(const Schedule& schedule, int rank, const PlanOptions& options);

/// A hash of everything that the ranks' programs do. Ranks that have the same schedule get the same
/// hash.
uint64_t hash_programs(const std::vector<Program>& programs);

/// Tiles in flight at once where ranks are on several hosts (interpret_together): enough to hide
/// latency, few enough to leave free slots.
inline constexpr int kTilesTogether = 2;

/// Whether two ranks may trade the places of messages in a call of blocks of `count` elements, with
/// so many tiles in flight: none of its messages is empty, and when a rank writes one, it has read
/// the one that was there (transport/ring/traded_places.h).
bool may_trade_places(const Plan& plan, int64_t count, int64_t tile_count, int num_together);

/// Elements of one block in one tile: as many as let the longest chunk range of any step fit a
/// slot's payload.
int64_t tile_count(const Plan& plan, int64_t slot_payload_bytes, size_t element_size);

}  // namespace pycoll
