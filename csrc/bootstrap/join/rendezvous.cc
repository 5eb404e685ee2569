#include "bootstrap/join/rendezvous.h"

#include <utility>
#include <vector>

#include "base/ending.h"
#include "base/error.h"
#include "bootstrap/join/joining.h"
#include "bootstrap/join/serialize.h"
#include "bootstrap/join/tcp_store.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

/// Ranks whose arrivals share a key: one bit for each.
constexpr int kRanksPerKey = 60;

const char kRankZeroKey[] = "join/rank_zero";
const char kNumArrivedKey[] = "join/num_arrived";
const char kNumVerdictsKey[] = "join/num_verdicts";
const char kVerdictKey[] = "join/verdict";
const char kTokenKey[] = "join/token";
std::string arrived_key(int rank) { return "join/arrived/" + std::to_string(rank / kRanksPerKey); }
int64_t arrived_bit(int rank) { return int64_t{1} << rank % kRanksPerKey; }
std::string done_key(int rank) { return "join/done/" + std::to_string(rank); }

/// The outcome of joining, identical on every rank.
struct Verdict {
  enum class Kind : uint8_t { kJoined, kTimeout, kUsage };
  Kind kind = Kind::kJoined;
  std::string text;  // kJoined: the session's name; else the error

  std::string to_bytes() const {
    return WireWriter().number(static_cast<uint8_t>(kind)).text(text).bytes();
  }
  static Verdict from(const std::string& bytes) {
    WireReader reader(bytes);
    const auto kind = static_cast<Kind>(reader.number<uint8_t>());
    return {.kind = kind, .text = std::string(reader.text())};
  }
  /// Returns the session's name, or raises the error.
  const std::string& name() const {
    if (kind == Kind::kTimeout) throw TimeoutError(text);
    if (kind == Kind::kUsage) throw UsageError(text);
    return text;
  }
};

/// Publishes a verdict, unless another rank has already done so.
void propose(Store& store, const Verdict& verdict) {
  if (store.add(kNumVerdictsKey, 1) == 1) store.set(kVerdictKey, verdict.to_bytes());
}

/// Describes where this rank and rank 0 disagree; empty if they agree.
std::string disagreement(Store& store, const LaunchEnv& env, const Deadline& deadline) {
  const std::string rank_zero = store.get(kRankZeroKey, deadline);
  WireReader reader(rank_zero);
  const int num_ranks = reader.number<int32_t>();
  const std::string who = "rank " + std::to_string(env.rank);
  if (num_ranks != env.num_ranks) {
    return who + " was started for a world of " + std::to_string(env.num_ranks) +
           " ranks, rank 0 for one of " + std::to_string(num_ranks);
  }
  return "";
}

void arrive(Store& store, const LaunchEnv& env, const Deadline& deadline) {
  if (env.rank == 0) {
    WireWriter own;
    own.number(static_cast<int32_t>(env.num_ranks));
    store.set(kRankZeroKey, own.bytes());
  }
  const std::string problem = disagreement(store, env, deadline);
  if (!problem.empty()) {
    propose(store, {.kind = Verdict::Kind::kUsage, .text = problem});
    return;
  }
  store.add(arrived_key(env.rank), arrived_bit(env.rank));
  if (store.add(kNumArrivedKey, 1) == env.num_ranks) {
    propose(store, {.kind = Verdict::Kind::kJoined, .text = random_hex()});
  }
}

std::vector<int> missing_ranks(Store& store, int num_ranks) {
  std::vector<int> missing;
  int64_t arrived = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank % kRanksPerKey == 0) arrived = store.add(arrived_key(rank), 0);
    if ((arrived & arrived_bit(rank)) == 0) missing.push_back(rank);
  }
  return missing;
}

Verdict wait_for_verdict(Store& store, const LaunchEnv& env, const Deadline& deadline,
                         bool has_claims = false) {
  try {
    return Verdict::from(store.get(kVerdictKey, deadline));
  } catch (const TimeoutError&) {
    // The first deadline that passes ends it for all ranks: a session needs every rank.
  }
  std::string text =
      did_not_join(missing_ranks(store, env.num_ranks), env.num_ranks, deadline.timeout_s());
  if (has_claims) {
    const std::string claims = store.get(kSecondClaimsKey, Deadline::after_s(kLastWordSeconds));
    if (!claims.empty()) text += "; " + claims;
  }
  propose(store, {.kind = Verdict::Kind::kTimeout, .text = text});
  return Verdict::from(store.get(kVerdictKey, Deadline::after_s(kLastWordSeconds)));
}

/// Waits on rank 0, which serves the store, until every rank knows that all have joined.
void wait_until_known(Store& store, const LaunchEnv& env, const Deadline& deadline) {
  if (env.rank != 0) return store.set(done_key(env.rank), "");
  for (int rank = 1; rank < env.num_ranks; ++rank) {
    try {
      store.get(done_key(rank), deadline);
    } catch (const TimeoutError&) {
      throw TimeoutError(did_not_join({rank}, env.num_ranks, deadline.timeout_s()));
    }
  }
}

}  // namespace

std::vector<std::string> Session::exchange(const std::string& topic, const std::string& own,
                                           const Deadline& deadline) {
  if (over_mpi) return over_mpi(topic, own);
  if (!store) throw UsageError("the session is closed");
  try {
    std::vector<std::string> all = StoreExchange(*store, rank, num_ranks, deadline)(topic, own);
    // Rank 0 may close the store after this call, so it waits until every rank has the result.
    const auto known = [&topic](int who) { return "known/" + topic + "/" + std::to_string(who); };
    if (rank != 0) store->set(known(rank), "");
    for (int peer = 1; rank == 0 && peer < num_ranks; ++peer) store->get(known(peer), deadline);
    return all;
  } catch (const Error&) {
    give_up();
    throw;
  }
}

void Session::give_up() {
  store.reset();
  if (server) server->stop(kLastWordSeconds);
}

std::string meet(Store& store, const LaunchEnv& env, const Deadline& deadline) {
  arrive(store, env, deadline);
  return wait_for_verdict(store, env, deadline).name();
}

void forget_meeting(Store& store, int num_ranks) {
  for (int rank = 0; rank < num_ranks; rank += kRanksPerKey) store.remove(arrived_key(rank));
  for (const char* key : {kRankZeroKey, kNumArrivedKey, kNumVerdictsKey, kVerdictKey}) {
    store.remove(key);
  }
}

Session join(const LaunchEnv& env, const Deadline& deadline) {
  Session session;
  session.rank = env.rank;
  session.num_ranks = env.num_ranks;
  // A world of one needs no port known to other ranks: a free one is never already in use.
  const bool alone = env.num_ranks == 1;
  session.token = alone ? Token{.text = random_hex()} : env.token;
  const std::string address = alone ? "127.0.0.1" : env.master_addr;
  int port = alone ? 0 : env.master_port;
  if (env.rank == 0) {
    session.server = std::make_unique<TcpStoreServer>(address, port, session.token,
                                                      /*reports_deaths=*/true, env.num_ranks);
    port = session.server->port();
  }
  session.store = std::make_unique<TcpStore>(address, port, session.token, env.rank, deadline);
  const bool needs_token = session.token.trust == Trust::kSameUser;
  try {
    if (needs_token && session.server) session.store->set(kTokenKey, random_hex());
    arrive(*session.store, env, deadline);
    session.name = wait_for_verdict(*session.store, env, deadline, /*has_claims=*/true).name();
    if (needs_token) session.token.text = session.store->get(kTokenKey, deadline);
    wait_until_known(*session.store, env, deadline);
  } catch (const Error&) {
    session.store.reset();
    // Lets the other ranks read the error.
    if (session.server) session.server->stop(kLastWordSeconds);
    throw;
  }
  return session;
}

}  // namespace pycoll
