// Cuts moves at the borders of blocks, for executions in which one block fills a slot.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace pycoll {

/// The same schedule with no range that holds chunks of two blocks. A round whose moves are cut
/// becomes several, so that a link needs no slot for each block. rounds[r] is set to the round of
/// `schedule` that round r of the result was in.
Schedule split_at_blocks(const Schedule& schedule, std::vector<int32_t>& rounds);

}  // namespace pycoll
