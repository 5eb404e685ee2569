#include "join/host_wire.h"

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/environment.h"
#include "base/error.h"
#include "base/printable.h"
#include "bootstrap/join/serialize.h"
#include "bootstrap/join/tcp_mesh.h"
#include "bootstrap/security/sha256.h"
#include "bootstrap/security/tls_setting.h"
#include "transport/net/tcp_wire.h"

namespace pycoll {
namespace {

/// A rank's settings and abilities, which the ranks exchange before they make the links.
struct Offer {
  std::string wanted;    // PYCOLL_TRANSPORT
  std::string settings;  // rank 0's settings; others: empty
  bool has_mpi = false;
  std::string no_mpi;  // why there is no MPI
  int mpi_rank = 0;    // in MPI_COMM_WORLD
  bool background = true;
  bool tls = false;  // PYCOLL_TLS
  Trust trust = Trust::kSecret;
  std::string knows;  // with a secret: proves that this rank has the same one

  std::string to_bytes() const {
    return WireWriter()
        .text(wanted)
        .text(settings)
        .number(static_cast<uint8_t>(has_mpi))
        .text(no_mpi)
        .number(static_cast<int32_t>(mpi_rank))
        .number(static_cast<uint8_t>(background))
        .number(static_cast<uint8_t>(tls))
        .number(static_cast<uint8_t>(trust))
        .text(knows)
        .bytes();
  }
  static Offer from(const std::string& bytes) {
    WireReader reader(bytes);
    Offer offer;
    offer.wanted = printable(reader.text());
    offer.settings = reader.text();
    offer.has_mpi = reader.number<uint8_t>() != 0;
    offer.no_mpi = printable(reader.text());
    offer.mpi_rank = reader.number<int32_t>();
    offer.background = reader.number<uint8_t>() != 0;
    offer.tls = reader.number<uint8_t>() != 0;
    offer.trust = static_cast<Trust>(reader.number<uint8_t>());
    offer.knows = reader.text();
    return offer;
  }
};

/// Whether this host has a network that MPI drives without the kernel: InfiniBand, RoCE, Omni-Path,
/// EFA, Slingshot. On other networks TCP was measured to be as fast or faster (docs/hosts.md).
bool has_fabric() {
  for (const char* folder : {"/sys/class/infiniband", "/sys/class/cxi"}) {
    std::error_code error;
    const std::filesystem::directory_iterator found(folder, error);
    if (!error && found != std::filesystem::directory_iterator()) return true;
  }
  return false;
}

std::string as_text(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

Offer own_offer(const Meeting& meeting) {
  Offer offer;
  offer.tls = tls_is_on();
  offer.trust = meeting.token.trust;
  if (offer.trust == Trust::kSecret) {
    offer.knows = as_text(hmac_sha256(meeting.token.text, "pycoll offer " + meeting.name));
  }
  offer.wanted = env_text(kTransportVariable).value_or("");
  if (offer.wanted == "tcp") return offer;
  if (offer.wanted.empty() && !(meeting.may_use_mpi && has_fabric())) return offer;
  try {
    const Mpi& found = mpi();
    offer.has_mpi = true;
    offer.mpi_rank = found.world_rank();
    offer.background = found.threads() == MpiThreads::kAny;
  } catch (const Error& error) {
    offer.no_mpi = error.what();
  }
  return offer;
}

std::string place(int rank, const HostTable& hosts) {
  return "rank " + std::to_string(rank) + " on host " + hosts.name_of(rank);
}

/// Raises UsageError if `rank` and rank 0 have no secret, or differ in PYCOLL_TLS or in the token.
void check_security(const std::vector<Offer>& offers, int rank, const HostTable& hosts) {
  const Offer& first = offers.front();
  const Offer& offer = offers[static_cast<size_t>(rank)];
  if (offer.tls != first.tls) {
    throw UsageError(place(offer.tls ? rank : 0, hosts) + " has " + kTlsVariable + "=1, and " +
                     place(offer.tls ? 0 : rank, hosts) +
                     " has not: set it to the same value on all ranks");
  }
  if (offer.trust != first.trust) {
    throw UsageError(place(rank, hosts) + " and " + place(0, hosts) +
                     " differ in whether PYCOLL_TOKEN is set: set it to the same value on all "
                     "ranks");
  }
  if (offer.trust == Trust::kSameUser) {
    throw UsageError("ranks on several hosts (" + hosts.names[0] + ", " + hosts.names[1] +
                     ") need a secret, and PYCOLL_TOKEN is not set: " + how_to_set_token());
  }
  if (offer.knows != first.knows) {
    throw UsageError(place(rank, hosts) + " has another PYCOLL_TOKEN than " + place(0, hosts) +
                     ": set it to the same value on all ranks");
  }
}

/// Chooses "tcp" or "mpi". All ranks get the same result, or the same error.
std::string choice_of(const std::vector<Offer>& offers, const HostTable& hosts) {
  const std::string& wanted = offers.front().wanted;
  for (int rank = 0; rank < static_cast<int>(offers.size()); ++rank) {
    const Offer& offer = offers[static_cast<size_t>(rank)];
    const std::string own = std::string(kTransportVariable) + "=" + offer.wanted;
    if (!offer.wanted.empty() && offer.wanted != "tcp" && offer.wanted != "mpi") {
      throw UsageError(place(rank, hosts) + " has " + own + ", expected tcp or mpi");
    }
    if (offer.wanted != wanted) {
      throw UsageError(place(rank, hosts) + " has " + own + ", and " + place(0, hosts) + " has " +
                       kTransportVariable + "=" + wanted +
                       ": set it to the same value on all ranks");
    }
    check_security(offers, rank, hosts);
    if (wanted == "mpi" && offer.tls) {
      throw UsageError(own + " cannot encrypt messages, but " + kTlsVariable +
                       "=1 requires it: unset one of them");
    }
    if (wanted == "mpi" && !offer.has_mpi) {
      throw UsageError(own + ", but MPI is not available on " + place(rank, hosts) + ": " +
                       offer.no_mpi);
    }
  }
  if (!wanted.empty()) return wanted;
  if (offers.front().tls) return "tcp";
  for (const Offer& offer : offers) {
    if (!offer.has_mpi) return "tcp";
  }
  return "mpi";
}

std::vector<int> remote_ranks(const HostTable& hosts, int rank) {
  std::vector<int> peers;
  for (int peer = 0; peer < static_cast<int>(hosts.host_of.size()); ++peer) {
    if (hosts.host_of[static_cast<size_t>(peer)] != hosts.host_of[static_cast<size_t>(rank)]) {
      peers.push_back(peer);
    }
  }
  return peers;
}

std::unique_ptr<Wire> connect_by_tcp(const Meeting& meeting, const HostsWorld& world,
                                     const Deadline& deadline) {
  const HostTable& hosts = world.hosts;
  std::optional<MeshListeners> listeners;
  std::string obstacle;
  try {
    listeners.emplace();
  } catch (const Error& error) {
    obstacle = error.what();
  }
  WireWriter own;
  own.text(obstacle).text(listeners ? listeners->to_bytes() : "");
  const std::vector<std::string> all = meeting.exchange("listeners", own.bytes());
  std::vector<MeshRank> ranks;
  for (int peer = 0; peer < meeting.num_ranks; ++peer) {
    const auto at = static_cast<size_t>(peer);
    WireReader reader(all[at]);
    // All ranks raise the same error.
    if (const std::string_view text = reader.text(); !text.empty()) {
      throw UsageError(place(peer, hosts) + ": " + printable(text));
    }
    const bool is_remote = hosts.host_of[at] != hosts.host_of[static_cast<size_t>(meeting.rank)];
    ranks.push_back({is_remote, std::string(reader.text()), hosts.name_of(peer)});
  }
  // A key of this session alone: a key learnt in another session does not fit.
  const std::string key = as_text(hmac_sha256(world.token, "pycoll links " + world.name));
  return std::make_unique<TcpWire>(
      connect_mesh(*listeners, meeting.rank, ranks, key, tls_is_on(), deadline));
}

}  // namespace

std::unique_ptr<Wire> connect_wire(const Meeting& meeting, HostsWorld& world, LinkRules& rules,
                                   const Deadline& deadline) {
  Offer own = own_offer(meeting);
  own.settings = world.settings;
  std::vector<Offer> offers;
  for (const std::string& bytes : meeting.exchange("offers", own.to_bytes())) {
    offers.push_back(Offer::from(bytes));
  }
  // The first rank of each host stores rank 0's settings in the shared memory of that host.
  world.settings = offers.front().settings;
  if (choice_of(offers, world.hosts) == "tcp") return connect_by_tcp(meeting, world, deadline);
  std::shared_ptr<MpiComm> comm = meeting.comm;
  if (comm == nullptr) {
    std::vector<int> members;
    for (const Offer& offer : offers) members.push_back(offer.mpi_rank);
    comm = mpi().of_members(members, meeting.name);
  }
  for (const Offer& offer : offers) {
    // A rank without background progress sends no heartbeats between its calls.
    if (!offer.background) rules.silence_s = 0;
  }
  rules.background = own.background;
  return comm->make_wire(remote_ranks(world.hosts, meeting.rank));
}

}  // namespace pycoll
