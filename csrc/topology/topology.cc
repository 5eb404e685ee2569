#include "topology/topology.h"

#include <algorithm>

#include "base/slot_bytes.h"

namespace pycoll {

Topology shared_memory_topology(int num_ranks, int num_cores) {
  Topology topology;
  topology.num_ranks = num_ranks;
  topology.num_cores = num_cores;
  // Fitted (pycoll.tuning.fit_costs) to five collectives of 4 KiB to 4 MiB with 2 and 4 ranks on 2
  // cores. On oversubscribed cores alpha is a turn of the scheduler, which grows with the number of
  // ranks per core; that of direct was fitted to 3 to 8 ranks (decision 0115).
  const bool crowded = topology.oversubscribed();
  const double ranks_per_core = static_cast<double>(num_ranks) / num_cores;
  const double turn_s = 0.3e-6 * ranks_per_core * std::clamp(ranks_per_core / 2, 1.0, 2.0);
  for (const Arrays arrays : kAllArrays) {
    LinkCost& simple = topology.cost(arrays, ProtocolKind::kSimple);
    LinkCost& ll = topology.cost(arrays, ProtocolKind::kLL);
    LinkCost& direct = topology.cost(arrays, ProtocolKind::kDirect);
    const bool mapped = arrays == Arrays::kMapped;
    // For plain arrays, direct makes a system call for each range that is read or written.
    if (crowded) {
      simple = {turn_s, 38e-12, 2e-12};
      ll = {1.13 * turn_s, 99e-12, 4e-12};
      direct =
          mapped ? LinkCost{1.2 * turn_s, 16e-12, 1e-12} : LinkCost{4.8 * turn_s, 68e-12, 13e-12};
    } else {
      // A compromise for two kinds of machines: cores that share a cache (simple: 36e-12), and
      // cores that do not (55e-12).
      simple = {80e-9, 42e-12, 6e-12};
      ll = {40e-9, 120e-12, 9e-12};
      direct = mapped ? LinkCost{90e-9, 9e-12, 13e-12} : LinkCost{800e-9, 55e-12, 40e-12};
    }
  }
  return topology;
}

int HostLevel::ranks_per_host() const {
  if (host_of.empty() || static_cast<int>(host_of.size()) % num_hosts != 0) return 0;
  const int per_host = static_cast<int>(host_of.size()) / num_hosts;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    if (host_of[rank] != static_cast<int>(rank) / per_host) return 0;
  }
  return per_host;
}

size_t HostLevel::message_bytes() const {
  if (num_hosts == 1) return kSlotBytes;
  const double bytes_in_flight = alpha_s / beta_s_per_byte;
  return one_per_host() || bytes_in_flight >= kSlotBytes ? kSlotBytesBetweenHosts : kSlotBytes;
}

HostLevel host_level(std::vector<int> host_of, const NetworkCost& measured) {
  HostLevel level;
  level.num_hosts = 1 + *std::max_element(host_of.begin(), host_of.end());
  level.host_of = std::move(host_of);
  level.alpha_s = 15e-6;
  level.beta_s_per_byte = 0.8e-9;
  level.message_s = 3e-6;
  level.copy_s_per_byte = 0.1e-9;
  if (measured.beta_s_per_byte > 0) {
    // The measured alpha includes the work of the sender and the receiver for a message.
    level.alpha_s = std::max(measured.alpha_s - 2 * level.message_s, 1e-6);
    level.beta_s_per_byte = measured.beta_s_per_byte;
  }
  return level;
}

Topology device_topology(int num_ranks) {
  Topology topology;
  topology.num_ranks = num_ranks;
  topology.num_cores = num_ranks;  // each rank has its own blocks
  topology.of_devices = true;
  for (const Arrays arrays : kAllArrays) {
    topology.cost(arrays, ProtocolKind::kSimple) = {2.5e-6, 12e-12, 1e-12};
    topology.cost(arrays, ProtocolKind::kLL) = {1.2e-6, 20e-12, 1e-12};
    topology.cost(arrays, ProtocolKind::kLL128) = {1.3e-6, 13e-12, 1e-12};
    topology.cost(arrays, ProtocolKind::kPoison) = {1.0e-6, 12e-12, 1e-12};
    // The exchange and the exit each take the latency of a flag.
    topology.cost(arrays, ProtocolKind::kDirect) = {1.5e-6, 2e-12, 1e-12};
    // Its flags are written by streams, and no kernel is launched.
    topology.cost(arrays, ProtocolKind::kCopy) = {1.4e-6, 2e-12, 1e-12};
  }
  return topology;
}

}  // namespace pycoll
