// Which ranks share a host, and what the hosts are called.
#pragma once

#include <string>
#include <vector>

#include "bootstrap/join/exchange.h"

namespace pycoll {

/// Where each rank of a world runs. The same on all ranks.
struct HostTable {
  std::vector<int> host_of;        // by rank: hosts are numbered by their first ranks
  std::vector<std::string> names;  // by host: as the system calls it, for people
  std::vector<std::string> boots;  // by rank: hosts of one boot share their cores
  std::vector<std::string> cores;  // by rank: bits of the cores it may use

  int num_hosts() const { return static_cast<int>(names.size()); }
  const std::string& name_of(int rank) const {
    return names[static_cast<size_t>(host_of[static_cast<size_t>(rank)])];
  }
  /// Cores that at least one of these ranks may use, all hosts together.
  int num_cores(const std::vector<int>& ranks) const;
};

/// Collective over the ranks of `exchange`.
HostTable find_hosts(const Exchange& exchange);

}  // namespace pycoll
