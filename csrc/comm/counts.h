// Checks the counts of all_to_all: the ranks exchange and compare them before they send elements.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport/ring/segment.h"

namespace pycoll {

/// The row that a rank sends to its peers: its n send counts, then its n recv counts.
std::vector<int64_t> counts_row(const int64_t* send_counts, const int64_t* recv_counts,
                                int num_ranks);

/// Raises the same CollectiveMismatchError on all ranks if a rank sends another number of elements
/// than its peer expects. `rows` are the concatenated rows of all ranks, which operation `sequence`
/// of `segment` gathered.
void check_counts(std::span<const int64_t> rows, const Segment& segment, uint64_t sequence);

}  // namespace pycoll
