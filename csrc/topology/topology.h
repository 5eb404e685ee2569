// The machine as the planner sees it: how many ranks and cores, and what a message costs on a link.
#pragma once

#include "schedule/simulate.h"

namespace pycoll {

struct Topology {
  int num_ranks = 1;
  int num_cores = 1;
  LinkCost simple;  // per message of the `simple` protocol
  LinkCost ll;      // per message of the `ll` protocol

  /// More ranks than cores: a rank that waits takes the core of one that works.
  bool oversubscribed() const { return num_ranks > num_cores; }
};

/// Cores that this process may run on.
int num_usable_cores();

/// Ranks that share one host's memory. The constants were measured on server cores of 2023; the
/// order of the candidates depends on their ratios only.
Topology shared_memory_topology(int num_ranks, int num_cores);

}  // namespace pycoll
