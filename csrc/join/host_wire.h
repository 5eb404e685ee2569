// Connects the hosts of a session by TCP or MPI. The ranks agree on one of the two.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/join/exchange.h"
#include "bootstrap/security/token.h"
#include "mpi/mpi.h"
#include "transport/transport.h"

namespace pycoll {

/// Environment variable: tcp or mpi. Unset: see connect_wire.
inline constexpr const char* kTransportVariable = "PYCOLL_TRANSPORT";

/// Ranks that have found each other.
struct Meeting {
  int rank = 0;
  int num_ranks = 1;
  std::string name;  // of the session
  Token token;       // of these ranks
  Exchange exchange;
  std::shared_ptr<MpiComm> comm;  // these ranks, in this order; null unless they met over MPI
  bool may_use_mpi = false;       // the launcher is MPI's
};

/// Makes the links to the ranks on other hosts, and sets `rules` and rank 0's settings in `world`.
///
/// PYCOLL_TRANSPORT chooses the wire, identically on all ranks. Unset: MPI if all ranks have it and
/// a network that MPI drives without the kernel, else TCP. Raises UsageError on all ranks if the
/// ranks have no secret, if their settings differ, or if a rank lacks the chosen wire.
std::unique_ptr<Wire> connect_wire(const Meeting& meeting, HostsWorld& world, LinkRules& rules,
                                   const Deadline& deadline);

}  // namespace pycoll
