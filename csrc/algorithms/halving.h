// Recursive halving and doubling, for any number of ranks: the two halves of halving_doubling.
#pragma once

#include "schedule/schedule.h"

namespace pycoll {

/// Rounds of each half: ceil(lg n).
int num_halving_rounds(int num_ranks);

/// Reduce-scatter over n chunks in rounds from `first_round` on: place p ends with chunk p reduced.
/// Place p is rank (root + p) mod n.
void add_halving(ScheduleBuilder& builder, int num_ranks, int first_round, int root = 0);

/// All-gather over n chunks in rounds from `first_round` on: place p starts with chunk p.
void add_doubling(ScheduleBuilder& builder, int num_ranks, int first_round);

}  // namespace pycoll
