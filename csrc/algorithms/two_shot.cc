// Two shots: all pairs exchange directly. Rank c reduces chunk c from all ranks, then sends it to
// all, or to the root of a reduce.
//
// Cost: all_reduce 2(n-1)(alpha + beta N/n) + (n-1) gamma N/n, reduce the same. Each rank sends
// 2(n-1)/n of the message in an all_reduce, the minimum, in two rounds, which suits machines where
// every pair of ranks has its own link.
// Source: the "two-shot" all-reduce of FasterTransformer and MSCCL++'s all-pairs (2023).
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule two_shot_all_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllReduce, "two_shot", num_ranks,
                          /*num_chunks=*/num_ranks, root);
  for (int owner = 0; owner < num_ranks; ++owner) {
    for (int peer = 0; peer < num_ranks; ++peer) {
      if (peer == owner) continue;
      builder.reduce(0, {owner}, peer, owner);
      builder.copy(1, {owner}, owner, peer);
    }
  }
  return builder.build();
}

Schedule two_shot_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kReduce, "two_shot", num_ranks, /*num_chunks=*/num_ranks,
                          root);
  for (int owner = 0; owner < num_ranks; ++owner) {
    for (int peer = 0; peer < num_ranks; ++peer) {
      if (peer != owner) builder.reduce(0, {owner}, peer, owner);
    }
    if (owner != root) builder.copy(1, {owner}, owner, root);
  }
  return builder.build();
}

}  // namespace pycoll
