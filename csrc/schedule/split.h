// Splits moves into shorter ones, for executions in which a short one fills a slot.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace pycoll {

/// Returns the schedule with every range cut at the multiples of `chunks`, such as the borders of
/// blocks. A round whose moves are cut becomes several rounds, so that a link does not need a slot
/// for each part. Sets rounds[r] to the round of `schedule` that became round r of the result.
Schedule split_moves(const Schedule& schedule, int32_t chunks, std::vector<int32_t>& rounds);

}  // namespace pycoll
