#include "topology/topology.h"

#include <algorithm>

namespace pycoll {

Topology shared_memory_topology(int num_ranks, int num_cores) {
  Topology topology;
  topology.num_ranks = num_ranks;
  topology.num_cores = num_cores;
  // Fitted to all_reduce and broadcast of 4 B to 4 MiB with 2, 4 and 8 ranks on 2 cores. A crowded
  // core's alpha is a turn of the scheduler, and grows with the ranks that want it.
  if (topology.oversubscribed()) {
    const double ranks_per_core = static_cast<double>(num_ranks) / num_cores;
    const double alpha_s = 0.45e-6 * ranks_per_core * std::min(ranks_per_core / 2, 2.0);
    topology.cost(ProtocolKind::kSimple) = {1.03 * alpha_s, 120e-12, 15e-12};
    topology.cost(ProtocolKind::kLL) = {alpha_s, 300e-12, 15e-12};
  } else {
    topology.cost(ProtocolKind::kSimple) = {50e-9, 18e-12, 38e-12};
    topology.cost(ProtocolKind::kLL) = {25e-9, 80e-12, 2e-12};
  }
  return topology;
}

}  // namespace pycoll
