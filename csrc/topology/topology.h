// The machine as the planner models it: the numbers of ranks and cores, and a message's cost on a
// link.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/arrays.h"
#include "base/protocol_kind.h"
#include "schedule/simulate.h"

namespace pycoll {

/// Time of a message between two hosts: alpha + beta * bytes. Zeros: not measured.
struct NetworkCost {
  double alpha_s = 0;
  double beta_s_per_byte = 0;
};

/// Several hosts and the cost of a message between two of them.
struct HostLevel {
  std::vector<int> host_of;  // by rank; empty: all are on one host
  int num_hosts = 1;
  double alpha_s = 0;          // from the end of a message's sending until it can be read
  double beta_s_per_byte = 0;  // of a host's port in each direction; its ranks share the port
  double message_s = 0;        // of a core, for each message that is sent or received
  double copy_s_per_byte = 0;  // of a core, into the kernel and out of it

  bool is_remote(size_t a, size_t b) const { return !host_of.empty() && host_of[a] != host_of[b]; }
  /// Ranks of each host if all hosts have equally many, numbered consecutively; else 0.
  int ranks_per_host() const;
  bool one_per_host() const { return num_hosts > 1 && ranks_per_host() == 1; }
  /// Bytes of a long message's parts: what suits a core's caches, or more where no ranks share
  /// them, and where that would not fill a link for the time of a flight.
  size_t message_bytes() const;
};

/// Costs between hosts, as measured; without a measurement, of TCP on a 10 Gbit/s server network.
HostLevel host_level(std::vector<int> host_of, const NetworkCost& measured);

struct Topology {
  int num_ranks = 1;
  int num_cores = 1;
  bool of_devices = false;  // ranks reach each other's device memory
  // Devices whose kernels take turns: plans whose waits are in streams come first.
  bool waits_in_streams = false;
  HostLevel hosts;
  // Per message of a protocol, for arrays of each kind. plan/estimate.h explains the parameters.
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

  /// Like cost(), for a message of `nbytes`: a second copy costs more when the first one no longer
  /// fits in the caches.
  LinkCost cost_of(Arrays arrays, ProtocolKind protocol, int64_t nbytes) const {
    LinkCost at = cost(arrays, protocol);
    if (protocol == ProtocolKind::kSimple && nbytes >= kPastCachesBytes)
      at.beta_s_per_byte *= kPastCaches;
    return at;
  }
  static constexpr int64_t kPastCachesBytes = int64_t{8} << 20;
  static constexpr double kPastCaches = 1.5;

  /// True when ranks outnumber cores, so that a waiting rank takes the core of a working one.
  bool oversubscribed() const { return num_ranks > num_cores; }
  /// True when the ranks write messages where they have read others (decision 0122).
  bool trades_places() const {
    return num_ranks == 2 && !oversubscribed() && !of_devices && hosts.num_hosts == 1;
  }
};

/// Ranks that share one host's memory, with constants measured on server cores of 2023. The order
/// of the candidates depends only on their ratios. `pycoll tune` fits the costs of a machine.
Topology shared_memory_topology(int num_ranks, int num_cores);

/// Ranks that reach each other's device memory. The constants are estimates from data sheets, not
/// yet confirmed by measurement; only their ratios matter.
Topology device_topology(int num_ranks);

}  // namespace pycoll
