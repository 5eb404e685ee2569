// Pairwise exchange: in round k, every rank sends to the rank k + 1 places further.
//
// Cost: (n-1)(alpha + beta N/n). In each round every rank sends one message and receives one, so no
// port is overloaded, which suits large messages.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", IJHPCA 19 (2005).
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule pairwise_all_to_all(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllToAll, "pairwise", n, /*num_chunks=*/n * n, root);
  for (int round = 0; round < n - 1; ++round) {
    for (int src = 0; src < n; ++src) {
      const int dst = (src + round + 1) % n;
      builder.copy(round, {src * n + dst}, src, dst);
    }
  }
  return builder.build();
}

}  // namespace pycoll
