// Direct exchange between neighbours on a ring: every rank sends to both sides at once.
//
// Cost: 2 alpha + beta N. With two ranks both neighbours are the same rank; a single rank is its
// own neighbour on both sides and sends nothing.
// Source: MPI_Neighbor_alltoall on a periodic one-dimensional Cartesian topology, MPI 3.0 (2012).
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule direct_neighbor_exchange(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kNeighborExchange, "direct", n, /*num_chunks=*/2 * n, root);
  for (int rank = 0; rank < n && n > 1; ++rank) {
    builder.copy(0, {2 * rank}, rank, (rank + n - 1) % n);
    builder.copy(0, {2 * rank + 1}, rank, (rank + 1) % n);
  }
  return builder.build();
}

}  // namespace pycoll
