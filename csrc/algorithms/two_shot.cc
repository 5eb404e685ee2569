// Two shots: all pairs exchange directly. Rank c reduces chunk c from all, then shows it to all.
//
// Cost: 2(n-1)(alpha + beta N/n) + (n-1) gamma N/n. Each rank sends 2(n-1)/n of the message, the
// least possible, in two rounds: where every pair of ranks has a link of its own.
// Source: the "two-shot" all-reduce of FasterTransformer and MSCCL++'s all-pairs (2023).
#include "algorithms/registry.h"

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

}  // namespace pycoll
