// Ring: reduce-scatter around the ring, then all-gather around the ring.
//
// Cost: 2(n-1)(alpha + beta N/n) + (n-1) gamma N/n. Each rank sends 2(n-1)/n of the message, which
// is the least possible, in 2(n-1) rounds: for large messages.
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", JPDC 69 (2009).
#include "algorithms/registry.h"

namespace pycoll {

Schedule ring_all_reduce(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllReduce, "ring", n, /*num_chunks=*/n, root);
  for (int round = 0; round < n - 1; ++round) {
    for (int rank = 0; rank < n; ++rank) {
      const int next = (rank + 1) % n;
      // Chunk c starts at rank c + 1 and is complete when it has come round to rank c.
      builder.reduce(round, {(rank - 1 - round + n) % n}, rank, next);
      builder.copy(n - 1 + round, {(rank - round + n) % n}, rank, next);
    }
  }
  return builder.build();
}

}  // namespace pycoll
