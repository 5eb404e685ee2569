// Chain: each rank passes the data on to the next rank.
//
// Cost: (n-1)(alpha + beta N) for one tile, and alpha + beta T for each further tile of T bytes, as
// the tiles follow one another down the chain. broadcast and reduce suit large messages of few
// ranks: no rank sends or receives more than N. reduce and scan add gamma N per rank; in exscan
// every rank sends two messages, as it first takes its neighbour's value.
// Scans are left folds, ((r0 + r1) + r2) + ..., and a reduce adds from the far end: r0 + (r1 + r2).
// Source: folklore; analysed in J. Pjesivac-Grbovic et al., "Performance analysis of MPI collective
// operations", Cluster Computing 10 (2007).
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule chain_broadcast(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kBroadcast, "chain", n, /*num_chunks=*/1, root);
  for (int place = 0; place + 1 < n; ++place) {
    builder.copy(place, {0}, (root + place) % n, (root + place + 1) % n);
  }
  return builder.build();
}

Schedule chain_reduce(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kReduce, "chain", n, /*num_chunks=*/1, root);
  for (int place = n - 1; place > 0; --place) {
    builder.reduce(n - 1 - place, {0}, (root + place) % n, (root + place - 1) % n);
  }
  return builder.build();
}

Schedule chain_scan(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kScan, "chain", num_ranks, /*num_chunks=*/1, root);
  for (int rank = 0; rank + 1 < num_ranks; ++rank) builder.reduce(rank, {0}, rank, rank + 1);
  return builder.build();
}

Schedule chain_exscan(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kExscan, "chain", num_ranks, /*num_chunks=*/1, root);
  // From round 1 on, rank r holds rank r - 1's value in place of its own.
  for (int rank = 0; rank + 1 < num_ranks; ++rank) {
    builder.copy(0, {0}, rank, rank + 1);
    if (rank > 0) builder.reduce(rank, {0}, rank, rank + 1);
  }
  return builder.build();
}

}  // namespace pycoll
