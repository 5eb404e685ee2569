// Star: one rank exchanges with all others directly, as a parameter server does.
//
// Cost: all_reduce 2(n-1)(alpha + beta N) + (n-1) gamma N, broadcast (n-1)(alpha + beta N), reduce
// (n-1)(alpha + beta N + gamma N) in one step that combines all ranks in their order; gather and
// scatter (n-1)(alpha + beta N/n), where no block travels twice. The centre of a broadcast sends
// n-1 messages, or writes one slot that all others read. The other ranks send at most one message.
// Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI
// 2014.
#include "algorithms/table/registry.h"

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

Schedule star_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kReduce, "star", num_ranks, /*num_chunks=*/1, root);
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank != root) builder.reduce(0, {0}, rank, root);
  }
  return builder.build();
}

Schedule star_gather(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kGather, "star", num_ranks, /*num_chunks=*/num_ranks, root);
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank != root) builder.copy(0, {rank}, rank, root);
  }
  return builder.build();
}

Schedule star_scatter(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kScatter, "star", num_ranks, /*num_chunks=*/num_ranks, root);
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank != root) builder.copy(0, {rank}, root, rank);
  }
  return builder.build();
}

}  // namespace pycoll
