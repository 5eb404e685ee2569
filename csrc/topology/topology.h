// The machine as the planner sees it: how many ranks and cores, and what a message costs on a link.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/arrays.h"
#include "base/protocol_kind.h"
#include "schedule/simulate.h"

namespace pycoll {

/// What a message between two hosts takes: alpha + beta * bytes. Zeros: not measured.
struct NetworkCost {
  double alpha_s = 0;
  double beta_s_per_byte = 0;
};

/// Several hosts and what a message between two of them costs.
struct HostLevel {
  std::vector<int> host_of;  // by rank; empty: all are on one host
  int num_hosts = 1;
  double alpha_s = 0;          // from the end of a message's sending until it can be read
  double beta_s_per_byte = 0;  // of a host's port, each way: what its ranks send goes one by one
  double message_s = 0;        // of a core, for each message that is sent or received
  double copy_s_per_byte = 0;  // of a core, into the kernel and out of it

  bool is_remote(size_t a, size_t b) const { return !host_of.empty() && host_of[a] != host_of[b]; }
  /// Ranks of each host, if all hosts have as many and their numbers follow each other; else 0.
  int ranks_per_host() const;
};

/// Between hosts, as measured; else over TCP on server networks of 10 Gbit/s.
HostLevel host_level(std::vector<int> host_of, const NetworkCost& measured);

struct Topology {
  int num_ranks = 1;
  int num_cores = 1;
  bool of_devices = false;  // ranks reach each other's device memory
  HostLevel hosts;
  // Per message of a protocol, for arrays of each kind. What they mean: plan/estimate.h.
  std::array<std::array<LinkCost, kNumProtocols>, kNumArrays> costs{};

  std::span<const ProtocolKind> protocols() const {
    return of_devices ? device_protocols() : pycoll::protocols();
  }
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

/// Ranks that reach each other's device memory. Its constants are estimates from data sheets: only
/// their ratios matter, and no measurement has confirmed them yet.
Topology device_topology(int num_ranks);

}  // namespace pycoll
