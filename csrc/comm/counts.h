// all_to_all with counts: before anything is sent, all ranks know all counts, and that they agree.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/ring/segment.h"

namespace pycoll {

/// What a rank tells the others: its send counts, then its recv counts. 2n numbers.
std::vector<int64_t> counts_row(const int64_t* send_counts, const int64_t* recv_counts,
                                int num_ranks);

/// Raises CollectiveMismatchError, on all ranks alike, when some rank sends another number of
/// elements than its peer expects. `rows` are the rows of all ranks, one behind the other, which
/// operation `sequence` of `segment` has brought.
void check_counts(std::span<const int64_t> rows, const Segment& segment, uint64_t sequence);

}  // namespace pycoll
