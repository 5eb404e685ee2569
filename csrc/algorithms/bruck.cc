// Bruck: in ceil(lg n) rounds, each rank exchanges with the ranks at distances 1, 2, 4, ...
//
// Cost: all_gather ceil(lg n) alpha + (n-1)/n beta N (up to twice the alphas, as a run of blocks
// that wraps around past rank n-1 is two messages). all_to_all about n/2 lg n (beta N/n) in
// ceil(lg n) rounds: a block that must go d ranks further travels once for each bit of d. Blocks
// that are not neighbours are separate messages, so it saves no alphas here, as packing would. It
// needs only ceil(lg n) links per direction where pairwise needs n-1, so it works beyond 65 ranks.
// Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", IEEE TPDS 8 (1997).
#include <algorithm>

#include "algorithms/binomial.h"
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule bruck_all_gather(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllGather, "bruck", n, /*num_chunks=*/n, root);
  for (int round = 0; round < num_binomial_rounds(n); ++round) {
    const int held = 1 << round;  // blocks rank, rank + 1, ...
    for (int rank = 0; rank < n; ++rank) {
      for (const ChunkRange& blocks : wrapped(rank, std::min(held, n - held), n)) {
        builder.copy(round, blocks, rank, (rank - held + n) % n);
      }
    }
  }
  return builder.build();
}

Schedule bruck_all_to_all(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllToAll, "bruck", n, /*num_chunks=*/n * n, root);
  // Starts with the highest bit of the distance: then the blocks that a rank passes on together
  // come from one source and go to neighbouring destinations. Each such run has its own round, so
  // that one slot per link is enough.
  int round = 0;
  for (int bit = num_binomial_rounds(n) - 1; bit >= 0; --bit) {
    const int hop = 1 << bit;
    for (int way_so_far = 0; way_so_far + hop < n; way_so_far += 2 * hop) {
      const int way = way_so_far + hop;  // distance of the run's first block from its source
      const int count = std::min(hop, n - way);
      bool wraps = false;
      for (int src = 0; src < n; ++src) {
        const int from = (src + way_so_far) % n;
        const auto runs = wrapped(src + way, count, n);
        for (size_t i = 0; i < runs.size(); ++i) {
          const ChunkRange blocks{src * n + runs[i].first, runs[i].count};
          builder.copy(round + static_cast<int>(i), blocks, from, (from + hop) % n);
        }
        wraps |= runs.size() == 2;
      }
      round += wraps ? 2 : 1;
    }
  }
  return builder.build();
}

}  // namespace pycoll
