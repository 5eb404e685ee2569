// A plan: a proved program with everything fixed that a call does not change. It holds no byte
// sizes of messages and no pointers into them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

struct Plan {
  Collective collective = Collective::kAllReduce;
  std::string algorithm;
  Program program;          // of this rank
  int min_slots = 0;        // proved; the transport's links have at least as many
  bool copy_input = false;  // the output must start as a copy of the input
};

/// Lowers and proves `schedule` for links of `num_slots` slots.
/// Raises UsageError when no proof is found: such a schedule is never run.
Plan make_plan(const Schedule& schedule, int rank, int num_slots, bool multicast);

/// Elements of one tile, so that the longest chunk range of any step fits a slot's payload.
int64_t tile_count(const Program& program, int64_t slot_payload_bytes, size_t element_size);

}  // namespace pycoll
