// How the ranks of a session join: through a store that rank 0 serves.
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

/// Ends with its owner: once rank 0's Session is destroyed, store calls of the other ranks raise
/// PeerDiedError.
struct Session {
  int rank = 0;
  int num_ranks = 1;
  Token token;
  std::string name;  // unique among all sessions ever; names local groups
  // The store is declared after the server, so that it disconnects before the server stops.
  std::unique_ptr<TcpStoreServer> server;  // rank 0 only
  std::unique_ptr<Store> store;
  Exchange over_mpi;  // set if the ranks joined through MPI; then there is no store

  /// Returns every rank's `own` bytes, by rank. Collective; each `topic` is used at most once.
  std::vector<std::string> exchange(const std::string& topic, const std::string& own,
                                    const Deadline& deadline);
  /// Leaves after an error. Rank 0 serves a little longer, so that other ranks can read the reason.
  void give_up();
};

/// Waits until all ranks have joined. The outcome is identical on every rank that arrived: a
/// session; TimeoutError, naming the ranks that had not arrived when the first rank's deadline
/// passed; PeerDiedError, if a rank ended while the others waited; or UsageError, if ranks disagree
/// about the world size. Without a secret, the ranks get a random token from rank 0.
Session join(const LaunchEnv& env, const Deadline& deadline);

/// As join(), through an existing store, such as another library's, and returns the session's name.
/// The keys begin with join/, so each group that joins through that store needs a prefix of its
/// own. Reads only the rank and the number of ranks from `env`.
std::string meet(Store& store, const LaunchEnv& env, const Deadline& deadline);
/// Removes the keys of meet(), once no rank reads them any more. One rank calls it.
void forget_meeting(Store& store, int num_ranks);

}  // namespace pycoll
