// All to all: every rank sends its whole message to every other rank, and each reduces all of it.
//
// Cost: (n-1)(alpha + beta N + gamma N). Each rank sends n-1 messages, one by one, in one round.
// Textbooks use it as the baseline; `one_shot` is the same without the n-1 copies.
// Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
// operations in MPICH", IJHPCA 19 (2005), section on all-to-all.
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule all_to_all_all_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllReduce, "all_to_all", num_ranks, /*num_chunks=*/1, root);
  builder.without_multicast();
  for (int src = 0; src < num_ranks; ++src) {
    for (int dst = 0; dst < num_ranks; ++dst) {
      if (src != dst) builder.reduce(0, {0}, src, dst);
    }
  }
  return builder.build();
}

}  // namespace pycoll
