// Lowering: converts the moves of all ranks to a program for each rank.
//
// Moves of one round with the same destination chunks become one step with fan-in; moves of one
// round with the same source chunks become one step with fan-out (or one multicast slot); a
// receive and the send that passes its result on are fused when that keeps every link's order.
#pragma once

#include <vector>

#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

struct LowerOptions {
  bool fuse = true;       // join a receive with the send that passes its result on
  bool multicast = true;  // the transport has links with one slot and many readers
  // A message may hold chunks of several blocks. Otherwise every move is first cut at the borders
  // of blocks, for payloads whose blocks fill a slot each.
  bool join_blocks = true;
  // A message may hold several chunks. Otherwise every move is first cut into its chunks, so that
  // all messages of a tile have the same size and each can fill a slot.
  bool join_chunks = true;
  bool phases = false;  // mark steps that a team of threads runs at once (phases.h)
};

/// One program per rank. Raises UsageError when a rank would have more than kMaxPeers peers.
std::vector<Program> lower(const Schedule& schedule, const LowerOptions& options = {});

/// Whether the schedule can be lowered: no rank has more than kMaxPeers peers.
bool has_few_peers(const Schedule& schedule);

}  // namespace pycoll
