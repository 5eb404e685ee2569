// Reduce, then broadcast: up a binomial tree to rank 0, and down the same tree.
//
// Cost: 2 ceil(lg n)(alpha + beta N) + ceil(lg n) gamma N. Rank 0 sends ceil(lg n) messages.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", IJHPCA 19 (2005).
#include "algorithms/binomial.h"
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule reduce_broadcast_all_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllReduce, "reduce_broadcast", num_ranks, /*num_chunks=*/1,
                          root);
  const int num_rounds = num_binomial_rounds(num_ranks);
  for_each_binomial_edge(num_ranks, /*root=*/0, [&](int round, int parent, int child) {
    builder.reduce(num_rounds - 1 - round, {0}, child, parent);
    builder.copy(num_rounds + round, {0}, parent, child);
  });
  return builder.build();
}

}  // namespace pycoll
