#include "join/init.h"

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "base/environment.h"
#include "base/error.h"
#include "bootstrap/join/rendezvous.h"
#include "bootstrap/join/serialize.h"
#include "bootstrap/security/tls_setting.h"
#include "bootstrap/security/token.h"
#include "comm/settings.h"
#include "join/host_wire.h"
#include "join/wire_cost.h"

namespace pycoll {
namespace {

Joined init_alone(double timeout_s) {
  return {std::make_unique<Communicator>(make_local_transport(make_world(1), 0), timeout_s),
          Session()};
}

/// Joins ranks that mpiexec started on several hosts without an address of rank 0.
Joined init_from_launcher(const LaunchEnv& env, const Deadline& deadline) {
  Mpi* found = nullptr;
  try {
    found = &mpi();
  } catch (const MpiError& error) {
    throw MpiError("mpiexec started the " + std::to_string(env.num_ranks) +
                   " ranks on several hosts, so they must meet through MPI, but " + error.what() +
                   ". Alternatively, set MASTER_ADDR to an address of rank 0's host, and "
                   "MASTER_PORT");
  }
  if (found->world_size() != env.num_ranks || found->world_rank() != env.rank) {
    throw MpiError(
        "the launcher says rank " + std::to_string(env.rank) + " of " +
        std::to_string(env.num_ranks) + ", MPI says rank " + std::to_string(found->world_rank()) +
        " of " + std::to_string(found->world_size()) + ": " + mpi_library_facts().path +
        " does not belong to this mpiexec; set PYCOLL_MPI to the library of the same MPI");
  }
  return init_over_mpi(found->duplicate_world(deadline), deadline);
}

/// Measures the network between the first ranks of the first two hosts, as an example for all.
/// Returns the same cost on all ranks.
NetworkCost network_cost(Wire& wire, const Meeting& meeting, const HostTable& hosts,
                         const Deadline& deadline) {
  const auto second = std::find(hosts.host_of.begin(), hosts.host_of.end(), 1);
  const auto other = static_cast<int>(second - hosts.host_of.begin());
  NetworkCost cost;
  if (meeting.rank == 0) cost = measure_wire(wire, other, /*leads=*/true, deadline);
  if (meeting.rank == other) measure_wire(wire, 0, /*leads=*/false, deadline);
  WireWriter own;
  own.number(cost.alpha_s).number(cost.beta_s_per_byte);
  const std::string of_rank_0 = meeting.exchange("network cost", own.bytes()).front();
  WireReader reader(of_rank_0);
  cost.alpha_s = reader.number<double>();
  cost.beta_s_per_byte = reader.number<double>();
  return cost;
}

std::unique_ptr<Transport> connect_hosts(const Meeting& meeting, HostsWorld world,
                                         const Deadline& deadline) {
  LinkRules rules;
  rules.silence_s = env_number(kSilenceVariable);
  std::unique_ptr<Wire> wire = connect_wire(meeting, world, rules, deadline);
  Settings settings = Settings::from_bytes(world.settings);
  settings.network = network_cost(*wire, meeting, world.hosts, deadline);
  world.settings = settings.to_bytes();
  return make_hosts_transport(std::move(world), meeting.rank, std::move(wire), rules, deadline);
}

}  // namespace

std::shared_ptr<LocalWorld> make_world(int num_ranks) {
  check_num_ranks(num_ranks);
  check_environment();
  return make_local_world(num_ranks, Settings::read().to_bytes());
}

Joined init_from_environment(double timeout_s, Deadline::Interrupt interrupt) {
  check_environment();
  const Deadline deadline = Deadline::after_s(timeout_s, interrupt);
  const LaunchEnv env = read_launch_env();
  check_num_ranks(env.num_ranks);
  if (env.num_ranks == 1) return init_alone(timeout_s);
  return env.has_address ? init_at(env, deadline) : init_from_launcher(env, deadline);
}

Joined init_at(const LaunchEnv& env, const Deadline& deadline) {
  check_environment();
  check_num_ranks(env.num_ranks);
  Session session = join(env, deadline);
  try {
    auto comm = std::make_unique<Communicator>(
        connect_through(*session.store, env.rank, env.num_ranks, session.name, session.token,
                        deadline, env.by_mpiexec),
        deadline.timeout_s());
    return {std::move(comm), std::move(session)};
  } catch (const Error&) {
    session.give_up();
    throw;
  }
}

Joined init_over_mpi(std::shared_ptr<MpiComm> comm, const Deadline& deadline) {
  check_environment();
  if (comm->size() == 1) return init_alone(deadline.timeout_s());
  const Exchange exchange = [comm, timeout_s = deadline.timeout_s()](const std::string&,
                                                                     const std::string& own) {
    return comm->exchange(own, Deadline::after_s(timeout_s));
  };
  // MPI connects ranks of the same job only, so rank 0 can make the token here.
  WireWriter own;
  own.text(random_hex()).text(random_hex());
  const std::string of_rank_0 = exchange("name", own.bytes()).front();
  WireReader reader(of_rank_0);
  Session session;
  session.rank = comm->rank();
  session.num_ranks = comm->size();
  session.name = reader.text();
  session.token.text = sealed_token(std::string(reader.text()));
  session.over_mpi = exchange;
  const Meeting meeting = {
      session.rank, session.num_ranks, session.name, session.token, exchange, comm, true};
  auto joined =
      std::make_unique<Communicator>(connect_ranks(meeting, deadline), deadline.timeout_s());
  return {std::move(joined), std::move(session)};
}

std::unique_ptr<Transport> connect_through(Store& store, int rank, int num_ranks,
                                           const std::string& name, const Token& token,
                                           const Deadline& deadline, bool may_use_mpi) {
  StoreExchange exchange(store, rank, num_ranks, deadline);
  try {
    auto transport = connect_ranks(
        {rank, num_ranks, name, token, std::ref(exchange), nullptr, may_use_mpi}, deadline);
    // Rank 0 gets here once all other ranks have read the store for the last time.
    exchange.forget();
    return transport;
  } catch (const UsageError&) {
    exchange.settle_error();
    throw;
  }
}

std::unique_ptr<Transport> connect_ranks(const Meeting& meeting, const Deadline& deadline) {
  check_num_ranks(meeting.num_ranks);
  HostTable hosts = find_hosts(meeting.exchange, SegmentLayout::name());
  const std::string settings = meeting.rank == 0 ? Settings::read().to_bytes() : std::string();
  if (hosts.num_hosts() == 1) {
    return make_shm_transport(meeting.name, meeting.rank, meeting.num_ranks, meeting.token.text,
                              deadline, settings);
  }
  return connect_hosts(meeting, {meeting.name, meeting.token.text, std::move(hosts), settings},
                       deadline);
}

}  // namespace pycoll
