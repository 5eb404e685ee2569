// The world's communicator, from what the launcher put into the environment, or of threads.
#pragma once

#include <memory>

#include "bootstrap/join/launch_env.h"
#include "bootstrap/join/rendezvous.h"
#include "comm/communicator.h"
#include "join/host_wire.h"

namespace pycoll {

/// After how many seconds of silence a rank of another host counts as lost; 0: never.
inline constexpr const char* kSilenceVariable = "PYCOLL_SILENCE_S";

struct Joined {
  std::unique_ptr<Communicator> comm;
  Session session;  // can exchange nothing where there is one rank
};

/// Joins the ranks that the environment names (bootstrap/join/launch_env.h). Collective over them.
/// Raises UsageError for an environment that makes no sense, TimeoutError naming the ranks that did
/// not come before the deadline, whose timeout is also that of every later operation. `interrupt`
/// lets a signal into the wait.
///
/// The communicator needs the session no more; the ranks may tell each other things through it.
Joined init_from_environment(double timeout_s, Deadline::Interrupt interrupt = nullptr);

/// The same at an address that is known.
Joined init_at(const LaunchEnv& env, const Deadline& deadline);
/// The same among the ranks of an MPI communicator, in their order.
Joined init_over_mpi(std::shared_ptr<MpiComm> comm, const Deadline& deadline);

/// The transport of ranks that have met: shared memory on one host, and links between hosts.
/// Collective over them; when it returns, no rank needs the exchange any more.
std::unique_ptr<Transport> connect_ranks(const Meeting& meeting, const Deadline& deadline);
/// The same of ranks that share a store, in which nothing stays. MPI may make the links only if
/// `may_use_mpi`, or if it is asked for (PYCOLL_TRANSPORT).
std::unique_ptr<Transport> connect_through(Store& store, int rank, int num_ranks,
                                           const std::string& name, const std::string& token,
                                           const Deadline& deadline, bool may_use_mpi = false);

/// A world of ranks that are threads of this process, with the settings of its environment.
std::shared_ptr<LocalWorld> make_world(int num_ranks);

}  // namespace pycoll
