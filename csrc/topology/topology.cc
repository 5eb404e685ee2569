#include "topology/topology.h"

#include <sched.h>

namespace pycoll {

int num_usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

Topology shared_memory_topology(int num_ranks, int num_cores) {
  Topology topology;
  topology.num_ranks = num_ranks;
  topology.num_cores = num_cores;
  // Oversubscribed, a message waits for the scheduler, not for a cache line; and the cores that the
  // ranks share divide the bandwidth.
  const bool crowded = topology.oversubscribed();
  const double share = crowded ? static_cast<double>(num_ranks) / num_cores : 1.0;
  topology.simple = {crowded ? 3.0e-6 : 0.30e-6, share / 12e9, share / 40e9};
  topology.ll = {crowded ? 2.7e-6 : 0.10e-6, share / 5e9, share / 40e9};
  return topology;
}

}  // namespace pycoll
