// How the ranks of a session find each other: through a store that rank 0 serves.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "bootstrap/join/exchange.h"
#include "bootstrap/join/launch_env.h"
#include "bootstrap/join/store.h"
#include "bootstrap/join/tcp_store_server.h"

namespace pycoll {

/// Ends with its owner: after rank 0's Session is gone, the others' store calls raise
/// PeerDiedError.
struct Session {
  int rank = 0;
  int num_ranks = 1;
  std::string token;
  std::string name;  // unique: different for every session that ever was; names local groups
  // The store is declared after the server, so that it leaves before the server stops.
  std::unique_ptr<TcpStoreServer> server;  // rank 0 only
  std::unique_ptr<Store> store;
  Exchange over_mpi;  // where the ranks have met so, and there is no store

  /// Every rank's `own` bytes, by rank. Collective; a `topic` is used once.
  std::vector<std::string> exchange(const std::string& topic, const std::string& own,
                                    const Deadline& deadline);
};

/// Waits until all ranks have joined. The outcome is the same on every rank that came: a session;
/// TimeoutError, naming the ranks that did not come before the first deadline to pass; or
/// UsageError, where ranks disagree about the world size.
Session join(const LaunchEnv& env, const Deadline& deadline);

/// The same through a store that others keep, such as another library's: the ranks' keys begin with
/// join/, so each group that ever meets there needs a Store with a prefix of its own. Returns the
/// session's name. Of `env` only the rank and the number of ranks count.
std::string meet(Store& store, const LaunchEnv& env, const Deadline& deadline);
/// Removes the keys of a meeting, once no rank looks at them any more. By one rank.
void forget_meeting(Store& store);

}  // namespace pycoll
