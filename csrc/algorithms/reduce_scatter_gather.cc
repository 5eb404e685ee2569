// Reduce as a reduce-scatter by recursive halving followed by a binomial gather.
//
// Cost: 2 ceil(lg n) alpha + (n-1)/n (2 beta + gamma) N; where n is not a power of two, up to
// ceil(lg n) alphas more. Each rank reduces 1/n of the message, where binomial's ranks reduce all
// of it, which suits large messages.
// Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
#include "algorithms/binomial.h"
#include "algorithms/halving.h"
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule reduce_scatter_gather_reduce(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kReduce, "reduce_scatter_gather", n, /*num_chunks=*/n, root);
  // Chunk p is reduced at place p, p ranks after the root.
  add_halving(builder, n, /*first_round=*/0, root);
  const int last_round = num_halving_rounds(n) + num_binomial_rounds(n) - 1;
  for_each_subtree_edge(n, [&](int round, int parent, int child) {
    builder.copy(last_round - round, {child, subtree_size(n, child)}, (root + child) % n,
                 (root + parent) % n);
  });
  return builder.build();
}

}  // namespace pycoll
