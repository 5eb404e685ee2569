// The world's communicator, from what the launcher put into the environment, or of threads.
#pragma once

#include <memory>

#include "bootstrap/rendezvous.h"
#include "bootstrap/store.h"
#include "comm/communicator.h"

namespace pycoll {

/// After how many seconds of silence a rank of another host counts as lost; 0: never.
inline constexpr const char* kSilenceVariable = "PYCOLL_SILENCE_S";

struct Joined {
  std::unique_ptr<Communicator> comm;
  Session session;  // without a store, where the ranks needed none
};

/// Joins the ranks that the environment names (bootstrap/launch_env.h). Collective over them.
/// Raises UsageError for an environment that makes no sense, TimeoutError naming the ranks that did
/// not come before the deadline, whose timeout is also that of every later operation. `interrupt`
/// lets a signal into the wait.
///
/// The communicator needs the session no more; the ranks may tell each other things in its store.
Joined init_from_environment(double timeout_s, Deadline::Interrupt interrupt = nullptr);

/// The transport of ranks that have met through `store` (bootstrap/rendezvous.h) as the session
/// `name`: shared memory on one host, and connections between hosts. Collective over them; when it
/// returns, no rank needs the store any more.
std::unique_ptr<Transport> connect_ranks(Store& store, int rank, int num_ranks,
                                         const std::string& name, const std::string& token,
                                         const Deadline& deadline);

/// A world of ranks that are threads of this process, with the settings of its environment.
std::shared_ptr<LocalWorld> make_world(int num_ranks);

}  // namespace pycoll
