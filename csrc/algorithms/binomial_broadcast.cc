// Binomial broadcast: in every round, each rank that has the message sends it to one that has not.
//
// Cost: ceil(lg n)(alpha + beta N). The root sends ceil(lg n) messages: for small messages.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", IJHPCA 19 (2005).
#include "algorithms/binomial.h"
#include "algorithms/registry.h"

namespace pycoll {

Schedule binomial_broadcast(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kBroadcast, "binomial", num_ranks, /*num_chunks=*/1, root);
  for_each_binomial_edge(num_ranks, root, [&](int round, int parent, int child) {
    builder.copy(round, {0}, parent, child);
  });
  return builder.build();
}

}  // namespace pycoll
