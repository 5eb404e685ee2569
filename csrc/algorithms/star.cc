// Star: rank 0 reduces everything and sends the result to all, as a parameter server does.
//
// Cost: all_reduce 2(n-1)(alpha + beta N) + (n-1) gamma N, broadcast (n-1)(alpha + beta N). The
// centre sends n-1 messages, or writes one slot that all others read; the others send at most one.
// Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI
// 2014.
#include "algorithms/registry.h"

namespace pycoll {

Schedule star_all_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllReduce, "star", num_ranks, /*num_chunks=*/1, root);
  for (int rank = 1; rank < num_ranks; ++rank) {
    builder.reduce(0, {0}, rank, 0);
    builder.copy(1, {0}, 0, rank);
  }
  return builder.build();
}

Schedule star_broadcast(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kBroadcast, "star", num_ranks, /*num_chunks=*/1, root);
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank != root) builder.copy(0, {0}, root, rank);
  }
  return builder.build();
}

}  // namespace pycoll
