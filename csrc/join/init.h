// Makes the world's communicator: of the launcher's processes, or of threads of this process.
#pragma once

#include <memory>

#include "bootstrap/join/launch_env.h"
#include "bootstrap/join/rendezvous.h"
#include "comm/communicator.h"
#include "join/host_wire.h"

namespace pycoll {

/// Environment variable: seconds of silence after which a rank of another host is lost; 0: never.
inline constexpr const char* kSilenceVariable = "PYCOLL_SILENCE_S";

struct Joined {
  std::unique_ptr<Communicator> comm;
  Session session;  // with a single rank it cannot exchange anything
};

/// Joins the ranks that the environment names (bootstrap/join/launch_env.h). Collective over them.
/// Raises UsageError for an invalid environment, for more ranks than a communicator can have, and
/// for ranks on several hosts without a secret; and TimeoutError naming the ranks that did not
/// join within `timeout_s`, which is also the timeout of every later operation. `interrupt` lets a
/// signal end the wait.
///
/// The communicator does not need the session; the ranks may exchange values through it.
Joined init_from_environment(double timeout_s, Deadline::Interrupt interrupt = nullptr);

/// Joins the ranks at the known address of `env`.
Joined init_at(const LaunchEnv& env, const Deadline& deadline);
/// Joins the ranks of an MPI communicator, in their order.
Joined init_over_mpi(std::shared_ptr<MpiComm> comm, const Deadline& deadline);

/// Makes the transport of ranks that have met: shared memory on one host, and links between hosts.
/// Collective over them; when it returns, no rank needs the exchange any more.
std::unique_ptr<Transport> connect_ranks(const Meeting& meeting, const Deadline& deadline);
/// Makes the transport of ranks that share a store, and leaves no keys in it. The links use MPI
/// only if `may_use_mpi` is set or PYCOLL_TRANSPORT asks for it.
std::unique_ptr<Transport> connect_through(Store& store, int rank, int num_ranks,
                                           const std::string& name, const Token& token,
                                           const Deadline& deadline, bool may_use_mpi = false);

/// Makes a world whose ranks are threads of this process, with the settings of its environment.
std::shared_ptr<LocalWorld> make_world(int num_ranks);

}  // namespace pycoll
