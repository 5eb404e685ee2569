#include "comm/init.h"

#include <cstdlib>
#include <optional>

#include "base/error.h"
#include "base/sha256.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/tcp_mesh.h"
#include "bootstrap/wire.h"
#include "comm/settings.h"
#include "transport/tcp_wire.h"

namespace pycoll {
namespace {

constexpr const char* kListenersKey = "hosts/listeners";
constexpr const char* kSettingsKey = "hosts/settings";
/// How long rank 0, having failed, serves on for the others to read why.
constexpr double kLastWordSeconds = 2;

double read_silence_s() {
  constexpr double kDefault = 5;
  const char* text = std::getenv(kSilenceVariable);
  if (text == nullptr || *text == 0) return kDefault;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != 0 || !(seconds >= 0) || seconds > 1e6) {
    throw UsageError(std::string(kSilenceVariable) + "=" + text +
                     " is not a number of seconds (0: never)");
  }
  return seconds;
}

std::unique_ptr<Wire> connect_by_tcp(Store& store, int rank, const HostsWorld& world,
                                     const Deadline& deadline) {
  const HostTable& hosts = world.hosts;
  const auto num_ranks = static_cast<int>(hosts.host_of.size());
  std::optional<MeshListeners> listeners;
  std::string obstacle;
  try {
    listeners.emplace();
  } catch (const Error& error) {
    obstacle = error.what();
  }
  WireWriter own;
  own.text(obstacle).text(listeners ? listeners->to_bytes() : "");
  const std::vector<std::string> all =
      exchange(store, rank, num_ranks, kListenersKey, own.bytes(), deadline);
  std::vector<MeshRank> ranks;
  for (int peer = 0; peer < num_ranks; ++peer) {
    const auto at = static_cast<size_t>(peer);
    WireReader reader(all[at]);
    // The same error on all ranks.
    if (const std::string_view text = reader.text(); !text.empty()) {
      throw UsageError("rank " + std::to_string(peer) + " on host " + hosts.name_of(peer) + ": " +
                       std::string(text));
    }
    const bool is_remote = hosts.host_of[at] != hosts.host_of[static_cast<size_t>(rank)];
    ranks.push_back({is_remote, std::string(reader.text()), hosts.name_of(peer)});
  }
  // Of the session alone: what was learnt in another one is of no use.
  const Digest key = hmac_sha256(world.token, "pycoll links " + world.name);
  const std::string_view key_bytes(reinterpret_cast<const char*>(key.data()), key.size());
  return std::make_unique<TcpWire>(connect_mesh(*listeners, rank, ranks, key_bytes, deadline));
}

std::unique_ptr<Transport> connect_hosts(Store& store, int rank, HostsWorld world,
                                         const Deadline& deadline) {
  // The first rank of every host puts rank 0's settings into the memory there.
  if (rank == 0) store.set(kSettingsKey, world.settings);
  if (rank != 0) world.settings = store.get(kSettingsKey, deadline);
  const double silence_s = read_silence_s();
  std::unique_ptr<Wire> wire = connect_by_tcp(store, rank, world, deadline);
  return make_hosts_transport(std::move(world), rank, std::move(wire), silence_s, deadline);
}

}  // namespace

std::shared_ptr<LocalWorld> make_world(int num_ranks) {
  return make_local_world(num_ranks, Settings::read().to_bytes());
}

Joined init_from_environment(double timeout_s, Deadline::Interrupt interrupt) {
  const Deadline deadline = Deadline::after_s(timeout_s, interrupt);
  const LaunchEnv env = read_launch_env();
  if (env.num_ranks == 1) {
    return {std::make_unique<Communicator>(make_local_transport(make_world(1), 0),
                                           deadline.timeout_s()),
            Session()};
  }
  Session session = join(env, deadline);
  try {
    auto comm =
        std::make_unique<Communicator>(connect_ranks(*session.store, env.rank, env.num_ranks,
                                                     session.name, session.token, deadline),
                                       deadline.timeout_s());
    return {std::move(comm), std::move(session)};
  } catch (const Error&) {
    session.store.reset();
    // The others read what kept the ranks apart.
    if (session.server) session.server->stop(kLastWordSeconds);
    throw;
  }
}

std::unique_ptr<Transport> connect_ranks(Store& store, int rank, int num_ranks,
                                         const std::string& name, const std::string& token,
                                         const Deadline& deadline) {
  const std::string settings = rank == 0 ? Settings::read().to_bytes() : std::string();
  HostTable hosts = find_hosts(store, rank, num_ranks, deadline);
  std::unique_ptr<Transport> transport;
  if (hosts.num_hosts() == 1) {
    transport = make_shm_transport(name, rank, num_ranks, token, deadline, settings);
  } else {
    transport = connect_hosts(store, rank, {name, token, std::move(hosts), settings}, deadline);
  }
  // All others have come to rank 0, behind their last look at the store.
  if (rank == 0) {
    for (const char* key : {kPlacesKey, kListenersKey, kSettingsKey}) store.remove(key);
  }
  return transport;
}

}  // namespace pycoll
