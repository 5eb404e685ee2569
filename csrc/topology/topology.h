// The machine as the planner sees it: how many ranks and cores, and what a message costs on a link.
#pragma once

#include <array>
#include <cstdint>

#include "base/arrays.h"
#include "base/protocol.h"
#include "schedule/simulate.h"

namespace pycoll {

struct Topology {
  int num_ranks = 1;
  int num_cores = 1;
  // Per message of a protocol, for arrays of each kind. What they mean: plan/estimate.h.
  std::array<std::array<LinkCost, kNumProtocols>, kNumArrays> costs{};

  const LinkCost& cost(Arrays arrays, ProtocolKind protocol) const {
    return costs[static_cast<size_t>(arrays)][static_cast<size_t>(protocol)];
  }
  LinkCost& cost(Arrays arrays, ProtocolKind protocol) {
    return costs[static_cast<size_t>(arrays)][static_cast<size_t>(protocol)];
  }

  /// The same for a message of `nbytes`: a second copy costs more where the first one no longer
  /// fits into the caches.
  LinkCost cost_of(Arrays arrays, ProtocolKind protocol, int64_t nbytes) const {
    LinkCost at = cost(arrays, protocol);
    if (protocol == ProtocolKind::kSimple && nbytes >= kPastCachesBytes)
      at.beta_s_per_byte *= kPastCaches;
    return at;
  }
  static constexpr int64_t kPastCachesBytes = int64_t{8} << 20;
  static constexpr double kPastCaches = 1.5;

  /// More ranks than cores: a rank that waits takes the core of one that works.
  bool oversubscribed() const { return num_ranks > num_cores; }
};

/// Ranks that share one host's memory, with constants that were measured on server cores of 2023:
/// the order of the candidates depends on their ratios only. `pycoll tune` fits a machine's own.
Topology shared_memory_topology(int num_ranks, int num_cores);

}  // namespace pycoll
