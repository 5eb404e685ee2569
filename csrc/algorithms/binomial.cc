// Binomial trees: in each round every rank with the message sends it on, so their number doubles.
//
// Cost: broadcast and reduce ceil(lg n)(alpha + beta N), plus gamma N each for reduce; scatter and
// gather ceil(lg n) alpha + (n-1)/n beta N, where inner ranks pass on their subtrees' blocks. The
// root sends or receives ceil(lg n) times, which suits small messages. Blocks are numbered by rank,
// so a subtree that wraps around past rank n-1 travels as two messages.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", IJHPCA 19 (2005).
#include "algorithms/binomial.h"

#include "algorithms/table/registry.h"

namespace pycoll {

Schedule binomial_broadcast(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kBroadcast, "binomial", num_ranks, /*num_chunks=*/1, root);
  for_each_binomial_edge(num_ranks, root, [&](int round, int parent, int child) {
    builder.copy(round, {0}, parent, child);
  });
  return builder.build();
}

Schedule binomial_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kReduce, "binomial", num_ranks, /*num_chunks=*/1, root);
  const int last_round = num_binomial_rounds(num_ranks) - 1;
  for_each_binomial_edge(num_ranks, root, [&](int round, int parent, int child) {
    builder.reduce(last_round - round, {0}, child, parent);
  });
  return builder.build();
}

Schedule binomial_scatter(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kScatter, "binomial", n, /*num_chunks=*/n, root);
  for_each_subtree_edge(n, [&](int round, int parent, int child) {
    for (const ChunkRange& blocks : wrapped(root + child, subtree_size(n, child), n)) {
      builder.copy(round, blocks, (root + parent) % n, (root + child) % n);
    }
  });
  return builder.build();
}

Schedule binomial_gather(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kGather, "binomial", n, /*num_chunks=*/n, root);
  const int last_round = num_binomial_rounds(n) - 1;
  for_each_subtree_edge(n, [&](int round, int parent, int child) {
    for (const ChunkRange& blocks : wrapped(root + child, subtree_size(n, child), n)) {
      builder.copy(last_round - round, blocks, (root + child) % n, (root + parent) % n);
    }
  });
  return builder.build();
}

}  // namespace pycoll
