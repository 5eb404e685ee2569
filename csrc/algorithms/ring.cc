// Ring: reduce-scatter around the ring, then all-gather around the ring; or one of the two alone.
//
// Cost: reduce_scatter (n-1)(alpha + beta N/n + gamma N/n), all_gather (n-1)(alpha + beta N/n),
// all_reduce the sum of both. Each rank sends (n-1)/n of the message in each half, the minimum, in
// n-1 rounds to one neighbour, which suits large messages.
// Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", JPDC 69 (2009).
#include "algorithms/table/registry.h"

namespace pycoll {
namespace {

/// Chunk c starts at rank c + 1 and is complete when it has gone around to rank c.
void add_reduce_scatter(ScheduleBuilder& builder, int n) {
  for (int round = 0; round < n - 1; ++round) {
    for (int rank = 0; rank < n; ++rank) {
      builder.reduce(round, {(rank - 1 - round + n) % n}, rank, (rank + 1) % n);
    }
  }
}

void add_all_gather(ScheduleBuilder& builder, int n, int first_round) {
  for (int round = 0; round < n - 1; ++round) {
    for (int rank = 0; rank < n; ++rank) {
      builder.copy(first_round + round, {(rank - round + n) % n}, rank, (rank + 1) % n);
    }
  }
}

}  // namespace

Schedule ring_all_reduce(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllReduce, "ring", n, /*num_chunks=*/n, root);
  add_reduce_scatter(builder, n);
  add_all_gather(builder, n, /*first_round=*/n - 1);
  return builder.build();
}

Schedule ring_reduce_scatter(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kReduceScatter, "ring", n, /*num_chunks=*/n, root);
  add_reduce_scatter(builder, n);
  return builder.build();
}

Schedule ring_all_gather(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllGather, "ring", n, /*num_chunks=*/n, root);
  add_all_gather(builder, n, /*first_round=*/0);
  return builder.build();
}

}  // namespace pycoll
