// Which ranks share a host, and what the hosts are called.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "bootstrap/store.h"

namespace pycoll {

inline constexpr const char* kPlacesKey = "hosts/places";

/// Every rank's `own` bytes, by rank. Collective; `key` is used once in the life of the store.
std::vector<std::string> exchange(Store& store, int rank, int num_ranks, const std::string& key,
                                  const std::string& own, const Deadline& deadline);

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

/// Collective over the ranks that share `store`, in which the table stays under kPlacesKey.
HostTable find_hosts(Store& store, int rank, int num_ranks, const Deadline& deadline);

}  // namespace pycoll
