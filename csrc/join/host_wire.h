// Which wire the hosts of a session get: TCP or MPI. The ranks agree, and all make the same one.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/join/exchange.h"
#include "mpi/mpi.h"
#include "transport/transport.h"

namespace pycoll {

/// tcp or mpi; unset: see connect_wire.
inline constexpr const char* kTransportVariable = "PYCOLL_TRANSPORT";

/// Ranks that have found each other.
struct Meeting {
  int rank = 0;
  int num_ranks = 1;
  std::string name;   // of the session
  std::string token;  // of these ranks alone
  Exchange exchange;
  std::shared_ptr<MpiComm> comm;  // of these ranks in this order, where they have met over MPI
  bool may_use_mpi = false;       // the launcher was MPI's
};

/// Links to the ranks on other hosts, and what holds for them. Fills in rank 0's settings.
///
/// PYCOLL_TRANSPORT says which, alike on all ranks. Unset: MPI where all ranks have one and a
/// network that is MPI's alone (choice_of explains), else TCP. Raises UsageError on all ranks where
/// they disagree, or one of them has not what is asked for.
std::unique_ptr<Wire> connect_wire(const Meeting& meeting, HostsWorld& world, LinkRules& rules,
                                   const Deadline& deadline);

}  // namespace pycoll
