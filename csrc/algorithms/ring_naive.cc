// Naive ring: the message travels around the ring to be reduced, then its result does.
//
// Cost: 2(n-1)(alpha + beta N) + (n-1) gamma N. One rank works at a time; it is the baseline for
// the chunked ring.
// Source: folklore; analysed as the starting point of Patarasuk & Yuan, JPDC 69 (2009).
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule ring_naive_all_reduce(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllReduce, "ring_naive", n, /*num_chunks=*/1, root);
  for (int round = 0; round < n - 1; ++round) {
    builder.reduce(round, {0}, round, round + 1);
    builder.copy(n - 1 + round, {0}, (n - 1 + round) % n, round);
  }
  return builder.build();
}

}  // namespace pycoll
