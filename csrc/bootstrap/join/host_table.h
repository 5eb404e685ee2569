// Which ranks share a host, and the names of the hosts.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/join/exchange.h"

namespace pycoll {

/// Where each rank of a world runs; identical on all ranks.
struct HostTable {
  std::vector<int> host_of;        // by rank: hosts are numbered in the order of their first ranks
  std::vector<std::string> names;  // by host: its gethostname(), for messages
  std::vector<std::string> boots;  // by rank: boot ids; hosts with the same one share their cores
  std::vector<std::string> cores;  // by rank: bit mask of the cores that it may use

  int num_hosts() const { return static_cast<int>(names.size()); }
  const std::string& name_of(int rank) const {
    return names[static_cast<size_t>(host_of[static_cast<size_t>(rank)])];
  }
  /// Number of cores that at least one of these ranks may use, summed over all hosts.
  int num_cores(const std::vector<int>& ranks) const;
};

/// Collective over the ranks of `exchange`, before anything else. `layout` names the layout of the
/// memory that ranks share. Raises UsageError on all ranks if the ranks have different versions of
/// pycoll or different layouts.
HostTable find_hosts(const Exchange& exchange, const std::string& layout);

}  // namespace pycoll
