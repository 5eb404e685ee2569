// Collectives for hosts with several ranks each, composed of rings inside hosts and between them.
#pragma once

#include "schedule/schedule.h"

namespace pycoll {

/// Whether hierarchical() has a schedule for the collective.
bool has_hierarchical(Collective collective);

/// Host h has ranks [h * ranks_per_host, (h + 1) * ranks_per_host).
/// Raises UsageError for a collective that has none, or when num_ranks is no multiple of
/// ranks_per_host.
Schedule hierarchical(Collective collective, int num_ranks, int ranks_per_host, int root = 0);

}  // namespace pycoll
