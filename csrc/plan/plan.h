// A plan: a proved program with everything fixed that a call does not change. It holds no byte
// sizes of messages and no pointers into them.
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
  Program program;              // of this rank
  Placement placement;          // of its local chunks
  int min_slots = 0;            // proved; the transport's links have at least as many
  Order order = Order::kOther;  // proved, of its reductions
  bool spans_blocks = false;    // a range of some rank holds several blocks: a message is one tile

  /// Valid as long as the plan lives and is not changed.
  ProgramView view() const {
    return {
        program.steps.data(), placement.steps.data(), static_cast<int32_t>(program.steps.size()),
        placement.num_pieces, program.peers.data(),   program.self_position};
  }
};

struct PlanOptions {
  int num_slots = 8;        // of the transport's links
  bool multicast = true;    // it has one-slot-many-readers links
  bool join_blocks = true;  // a range may span blocks: for messages of one tile
  bool join_chunks = true;  // a range may hold several chunks
};

/// Lowers, proves and places `schedule`.
/// Raises UsageError when no proof is found: such a schedule is never run.
Plan make_plan(const Schedule& schedule, int rank, const PlanOptions& options);

/// Tiles that are under way at once where ranks are on several hosts (interpret_together): so many
/// that a flight between hosts is not waited out, so few that slots are left to run ahead in.
inline constexpr int kTilesTogether = 2;

/// Elements of one block in one tile, so that the longest chunk range of any step fits a slot's
/// payload.
int64_t tile_count(const Plan& plan, int64_t slot_payload_bytes, size_t element_size);

}  // namespace pycoll
