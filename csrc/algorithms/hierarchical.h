// Collectives of hosts with several ranks each, composed of rings inside hosts and between them.
#pragma once

#include "schedule/schedule.h"

namespace pycoll {

/// Ranks [h * ranks_per_host, (h + 1) * ranks_per_host) are host h. For all_reduce, reduce_scatter,
/// all_gather and broadcast.
/// Raises UsageError for another collective, or when hosts of that size do not make num_ranks.
Schedule hierarchical(Collective collective, int num_ranks, int ranks_per_host, int root = 0);

}  // namespace pycoll
