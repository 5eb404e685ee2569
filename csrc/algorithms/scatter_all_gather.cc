// Broadcast as a binomial scatter followed by an all-gather around a ring.
//
// Cost: (ceil(lg n) + n-1) alpha + 2(n-1)/n beta N. No rank sends more than about twice the
// message, where binomial's root sends it ceil(lg n) times, which suits large messages. The
// all-gather skips blocks that the scatter has left at a rank.
// Source: M. Barnett, L. Shuler, R. van de Geijn et al., "Interprocessor collective communication
// library (InterCom)", SHPCC 1994.
#include "algorithms/binomial.h"
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule scatter_all_gather_broadcast(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kBroadcast, "scatter_all_gather", n, /*num_chunks=*/n, root);
  // Chunk p is the first chunk that place p, p ranks after the root, passes around the ring.
  for_each_subtree_edge(n, [&](int round, int parent, int child) {
    builder.copy(round, {child, subtree_size(n, child)}, (root + parent) % n, (root + child) % n);
  });
  const int num_rounds = num_binomial_rounds(n);
  for (int round = 0; round < n - 1; ++round) {
    for (int place = 0; place < n; ++place) {
      const int next = (place + 1) % n;
      const int chunk = (place - round + n) % n;
      const bool next_has_it = next <= chunk && chunk < next + subtree_size(n, next);
      if (next_has_it) continue;
      builder.copy(num_rounds + round, {chunk}, (root + place) % n, (root + next) % n);
    }
  }
  return builder.build();
}

}  // namespace pycoll
