// Cuts moves into shorter ones, for executions in which one of these fills a slot.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace pycoll {

/// The same schedule with every range cut at the multiples of `chunks`, such as the borders of
/// blocks. A round whose moves are cut becomes several, so that a link needs no slot for each part.
/// rounds[r] is set to the round of `schedule` that round r of the result was in.
Schedule split_moves(const Schedule& schedule, int32_t chunks, std::vector<int32_t>& rounds);

}  // namespace pycoll
