#include "bootstrap/join/tcp_mesh.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>

#include "base/environment.h"
#include "base/error.h"
#include "base/socket.h"
#include "bootstrap/join/interfaces.h"
#include "bootstrap/join/joining.h"
#include "bootstrap/join/serialize.h"
#include "bootstrap/security/mesh_handshake.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

constexpr int64_t kHandshakeNs = 10'000'000'000;
constexpr int64_t kAttemptNs = 3'000'000'000;
constexpr int64_t kRetryNs = 100'000'000;
constexpr int64_t kPollNs = 50'000'000;
constexpr const char* kOtherJob = "the server at that address belongs to another job";

struct Target {
  std::string text;
  SocketAddress address;
  int peer;
  int64_t retry_at_ns = 0;
  bool busy = false;
  std::string obstacle = "no answer";
};

struct Attempt {
  Channel channel;
  std::unique_ptr<MeshHandshake> handshake;
  Target* target = nullptr;  // null on the accepting end
  bool connecting = false;
  int64_t end_ns = 0;
};

void set_options(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

class Mesh {
 public:
  Mesh(const MeshListeners& listeners, int rank, const std::vector<MeshRank>& ranks,
       std::string_view key, bool encrypted, const Deadline& deadline)
      : listeners_(listeners),
        rank_(rank),
        ranks_(ranks),
        key_(key),
        encrypted_(encrypted),
        deadline_(deadline) {
    links_.resize(ranks.size());
    for (int peer = 0; peer < rank; ++peer) {
      if (ranks[static_cast<size_t>(peer)].is_remote) add_targets(peer);
    }
  }

  std::vector<Channel> connect() {
    std::vector<pollfd> fds;
    while (const std::optional<int> missing = first_missing()) {
      if (deadline_.expired()) give_up(*missing);
      for (Target& target : targets_) try_target(target);
      fds.clear();
      for (const Fd& listener : listeners_.sockets()) {
        fds.push_back({.fd = listener.get(), .events = POLLIN, .revents = 0});
      }
      for (const Attempt& one : attempts_) {
        const short events = one.connecting ? POLLOUT : POLLIN;
        fds.push_back({.fd = one.channel.fd(), .events = events, .revents = 0});
      }
      poll_fds(fds, std::min(kPollNs, std::max<int64_t>(deadline_.remaining_ns(), 0)));
      deadline_.check_interrupt();
      const size_t num_listeners = listeners_.sockets().size();
      for (size_t i = 0; i < attempts_.size(); ++i) {
        if (fds[num_listeners + i].revents != 0) advance(attempts_[i]);
      }
      for (size_t i = 0; i < num_listeners; ++i) {
        if (fds[i].revents != 0) accept_all(listeners_.sockets()[i].get());
      }
      drop_the_gone();
    }
    return std::move(links_);
  }

 private:
  Channel& link(int peer) { return links_[static_cast<size_t>(peer)]; }

  Channel channel_over(Fd socket, Tls::Role role) const {
    return encrypted_ ? Channel(std::move(socket), role, key_) : Channel(std::move(socket));
  }

  std::optional<int> first_missing() const {
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      if (ranks_[peer].is_remote && !links_[peer]) return static_cast<int>(peer);
    }
    return std::nullopt;
  }

  void add_targets(int peer) {
    const std::string& bytes = ranks_[static_cast<size_t>(peer)].listeners;
    WireReader reader(bytes);
    for (auto left = reader.number<uint32_t>(); left != 0; --left) {
      const std::string host(reader.text());
      const int port = reader.number<int32_t>();
      targets_.push_back({.text = join_host_port(host, port),
                          .address = resolve_tcp(host, port).front(),
                          .peer = peer});
    }
  }

  void try_target(Target& target) {
    if (target.busy || link(target.peer) || now_ns() < target.retry_at_ns) return;
    target.retry_at_ns = now_ns() + kRetryNs;
    Fd socket(::socket(target.address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) throw_system_error("socket for a link to rank " + std::to_string(target.peer));
    set_options(socket.get());
    if (::connect(socket.get(), target.address.get(), target.address.length) != 0 &&
        errno != EINPROGRESS) {
      target.obstacle = std::strerror(errno);
      return;
    }
    target.busy = true;
    Attempt& attempt = attempts_.emplace_back();
    attempt.channel = channel_over(std::move(socket), Tls::Role::kConnects);
    attempt.handshake = std::make_unique<MeshHandshake>(key_, rank_, target.peer);
    attempt.target = &target;
    attempt.connecting = true;
    attempt.end_ns = now_ns() + kAttemptNs;
  }

  void accept_all(int listener) {
    for (;;) {
      Fd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        // Out of descriptors: close the oldest unauthenticated connection, accept the others later.
        if (errno == EMFILE || errno == ENFILE) drop_oldest_unauthenticated();
        return;
      }
      set_options(socket.get());
      Attempt& attempt = attempts_.emplace_back();
      attempt.channel = channel_over(std::move(socket), Tls::Role::kAccepts);
      attempt.handshake = std::make_unique<MeshHandshake>(key_, rank_);
      attempt.end_ns = now_ns() + kHandshakeNs;
    }
  }

  void advance(Attempt& attempt) {
    if (attempt.connecting) {
      int error = 0;
      socklen_t nbytes = sizeof(error);
      ::getsockopt(attempt.channel.fd(), SOL_SOCKET, SO_ERROR, &error, &nbytes);
      if (error == 0 && is_connected_to_itself(attempt.channel.fd())) error = ECONNREFUSED;
      if (error != 0) return drop(attempt, std::strerror(error));
      attempt.connecting = false;
    }
    const Tls::Greeting greeting = attempt.channel.greet();
    if (greeting == Tls::Greeting::kGoesOn) return;
    if (greeting == Tls::Greeting::kFailed) {
      return drop(attempt, kOtherJob);
    }
    const auto state = attempt.handshake->advance(attempt.channel, [this](int peer) {
      return peer > rank_ && peer < static_cast<int>(ranks_.size()) &&
             ranks_[static_cast<size_t>(peer)].is_remote && !link(peer);
    });
    if (state == MeshHandshake::State::kFailed) {
      return drop(attempt, kOtherJob);
    }
    const int peer = attempt.handshake->peer();
    if (state == MeshHandshake::State::kProved && !link(peer)) {
      // This end connected, so it chooses among the addresses that answer.
      if (attempt.handshake->choose(attempt.channel)) adopt(attempt);
    } else if (state == MeshHandshake::State::kChosen) {
      adopt(attempt);
    } else if (state == MeshHandshake::State::kProved) {
      drop(attempt, "another address answered first");
    }
  }

  void adopt(Attempt& attempt) {
    Channel& to = link(attempt.handshake->peer());
    if (!to) to = std::move(attempt.channel);
    attempt.channel.reset();
  }

  void drop(Attempt& attempt, const char* why) {
    if (attempt.target != nullptr) attempt.target->obstacle = why;
    attempt.channel.reset();
  }

  void drop_the_gone() {
    size_t num_unauthenticated = 0;
    for (Attempt& one : attempts_) {
      if (one.channel && now_ns() >= one.end_ns) drop(one, "no answer");
      num_unauthenticated += one.channel && one.target == nullptr;
    }
    for (; num_unauthenticated > kMaxUnauthenticated; --num_unauthenticated)
      drop_oldest_unauthenticated();
    for (Attempt& one : attempts_) {
      if (!one.channel && one.target != nullptr) one.target->busy = false;
    }
    std::erase_if(attempts_, [](const Attempt& one) { return !one.channel; });
  }

  void drop_oldest_unauthenticated() {
    const auto oldest = std::find_if(attempts_.begin(), attempts_.end(), [](const Attempt& one) {
      return one.channel && one.target == nullptr;
    });
    if (oldest != attempts_.end()) oldest->channel.reset();
  }

  [[noreturn]] void give_up(int peer) {
    std::string text = "rank " + std::to_string(rank_) + " and rank " + std::to_string(peer) +
                       " on host " + ranks_[static_cast<size_t>(peer)].host +
                       " could not connect within " + format_seconds(deadline_.timeout_s());
    std::string tried;
    for (const Target& target : targets_) {
      if (target.peer != peer) continue;
      tried += (tried.empty() ? "; tried " : ", ") + target.text + " (" + target.obstacle + ")";
    }
    throw TimeoutError(
        text + tried +
        ": set PYCOLL_IFNAME to interfaces that reach the other hosts, or PYCOLL_PORTS "
        "to ports that the firewall lets through");
  }

  const MeshListeners& listeners_;
  const int rank_;
  const std::vector<MeshRank>& ranks_;
  const std::string key_;
  const bool encrypted_;
  const Deadline& deadline_;
  std::deque<Target> targets_;  // a deque: Attempt points to its elements
  std::vector<Attempt> attempts_;
  std::vector<Channel> links_;
};

struct PortRange {
  int first = 0;
  int last = 0;
};

PortRange read_ports() {
  const auto text = env_text("PYCOLL_PORTS");
  if (!text) return {};
  const auto [first, last] = *env_parse_ports(*text);
  return {first, last};
}

/// Binds to the first free port of the range.
bool bind_within(int socket, SocketAddress address, const PortRange& range) {
  in_port_t& port = address.family() == AF_INET
                        ? reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port
                        : reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port;
  for (int wanted = range.first; wanted <= range.last; ++wanted) {
    port = htons(static_cast<uint16_t>(wanted));
    if (::bind(socket, address.get(), address.length) == 0) return ::listen(socket, 512) == 0;
    if (errno != EADDRINUSE) return false;
  }
  return false;
}

}  // namespace

MeshListeners::MeshListeners() {
  const std::string filter = env_text("PYCOLL_IFNAME").value_or("");
  const PortRange range = read_ports();
  std::string why;
  for (const InterfaceAddress& one : interface_addresses(filter)) {
    Fd socket(::socket(one.address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket || !bind_within(socket.get(), one.address, range)) {
      why = one.text + ": " + std::strerror(errno);
      continue;
    }
    ports_.push_back(local_address(socket.get()).port());
    addresses_.push_back(one.text);
    sockets_.push_back(std::move(socket));
  }
  if (sockets_.empty()) {
    throw SystemError(
        "cannot listen for ranks of other hosts at any address; the last one failed with " + why);
  }
}

std::string MeshListeners::to_bytes() const {
  WireWriter bytes;
  bytes.number(static_cast<uint32_t>(sockets_.size()));
  for (size_t i = 0; i < sockets_.size(); ++i) {
    bytes.text(addresses_[i]).number(static_cast<int32_t>(ports_[i]));
  }
  return bytes.bytes();
}

std::vector<Channel> connect_mesh(const MeshListeners& listeners, int rank,
                                  const std::vector<MeshRank>& ranks, std::string_view key,
                                  bool encrypted, const Deadline& deadline) {
  return Mesh(listeners, rank, ranks, key, encrypted, deadline).connect();
}

}  // namespace pycoll
