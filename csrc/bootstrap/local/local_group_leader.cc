#include "bootstrap/local/local_group_leader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/socket.h"
#include "bootstrap/join/joining.h"
#include "bootstrap/local/process_info.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

constexpr size_t kMaxPending = 2 * kMaxLocalRanks;

}  // namespace

Fd create_shared_memory(size_t nbytes) {
  // Some systems require MFD_NOEXEC_SEAL; kernels before Linux 6.3 reject it.
  constexpr unsigned kNoexecSeal = 8;
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Fd memory(::memfd_create("pycoll", kFlags | kNoexecSeal));
  if (!memory) memory = Fd(::memfd_create("pycoll", kFlags));
  if (!memory) throw_system_error("memfd_create");
  // Without the seals, a rank that shrinks the memory would kill the other ranks by SIGBUS.
  if (::ftruncate(memory.get(), static_cast<off_t>(nbytes)) != 0 ||
      ::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw_system_error("cannot make shared memory of " + std::to_string(nbytes) + " bytes");
  }
  return memory;
}

LocalGroupLeader::LocalGroupLeader(const std::string& socket_name, int num_ranks,
                                   size_t shared_bytes, const std::string& token)
    : num_ranks_(num_ranks),
      shared_bytes_(shared_bytes),
      token_(token),
      memory_(create_shared_memory(shared_bytes)),
      listener_(listen_at(socket_name)),
      joiners_(static_cast<size_t>(num_ranks)) {
  joiners_[0].pidfd = open_own_pidfd();
  joiners_[0].pid = ::getpid();
}

LocalGroup LocalGroupLeader::form(const Deadline& deadline, const PrepareMemory& prepare,
                                  Pidfds known) {
  try {
    gather(deadline);
    if (prepare) prepare(memory_.get(), pids());
    return welcome_all(deadline, std::move(known));
  } catch (const SystemError& error) {
    fail({.kind = GroupFailure::Kind::kSystem, .text = std::string("rank 0: ") + error.what()});
  }
}

void LocalGroupLeader::gather(const Deadline& deadline) {
  std::vector<pollfd> fds;
  while (!missing_ranks().empty()) {
    fds.assign(1, {.fd = listener_.get(), .events = POLLIN, .revents = 0});
    for (const Joiner& joiner : joiners_) {
      fds.push_back({.fd = joiner.socket.get(), .events = POLLIN, .revents = 0});
    }
    for (const PendingPeer& peer : pending_) {
      fds.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
    }
    const int64_t remaining_ns = deadline.remaining_ns();
    const int num_ready = poll_fds(fds, std::min(remaining_ns, kInterruptCheckNs));
    check_interrupt(deadline);
    if (num_ready == 0 && remaining_ns <= 0) fail(timeout_after(deadline.timeout_s()));

    const size_t first_pending = 1 + joiners_.size();
    for (int rank = 1; rank < num_ranks_; ++rank) {
      if (fds[static_cast<size_t>(1 + rank)].revents != 0) hear_joiner(rank, deadline);
    }
    for (size_t i = first_pending; i < fds.size(); ++i) {
      if (fds[i].revents != 0) hear_hello(std::move(pending_[i - first_pending]));
    }
    std::erase_if(pending_, [](const PendingPeer& one) { return !one.socket; });
    blame_ended();
    if (fds[0].revents != 0) accept_pending();
  }
}

void LocalGroupLeader::accept_pending() {
  while (Fd socket = accept_from(listener_.get())) {
    pid_t pid = -1;
    if (!is_own_user(socket.get(), &pid)) continue;
    // Silent connections must not use up the descriptors: close the oldest.
    if (pending_.size() == kMaxPending) pending_.erase(pending_.begin());
    pending_.push_back({.socket = std::move(socket), .pid = pid});
  }
}

void LocalGroupLeader::hear_hello(PendingPeer peer) {
  Packet packet = receive_packet(peer.socket.get());
  if (packet.bytes.empty()) silent_.add(peer.pid);
  const auto refuse = [&](const std::string& why) {
    const GroupFailure refusal = {.kind = GroupFailure::Kind::kUsage, .text = why};
    send_packet(peer.socket.get(), refusal.to_bytes(), {});
  };
  try {
    WireReader reader(packet.bytes);
    if (reader.number<uint8_t>() != static_cast<uint8_t>(GroupPacket::kHello)) return;
    const std::string_view token = reader.text();
    const int rank = reader.number<int32_t>();
    const int num_ranks = reader.number<int32_t>();
    const auto shared_bytes = reader.number<uint64_t>();
    reader.expect_end();
    const std::string who = "rank " + std::to_string(rank) + " cannot join the local group: ";
    if (!same_token(token_, token)) {
      refuse(who +
             "its session token differs from the leader's; set the same PYCOLL_TOKEN on all ranks");
    } else if (num_ranks != num_ranks_) {
      refuse(who + "it expects " + std::to_string(num_ranks) + " ranks, the leader " +
             std::to_string(num_ranks_));
    } else if (shared_bytes != shared_bytes_) {
      refuse(who + "it expects " + std::to_string(shared_bytes) +
             " bytes of shared memory, the leader " + std::to_string(shared_bytes_) +
             ": run the same version of pycoll on all ranks");
    } else if (rank < 1 || rank >= num_ranks_) {
      refuse(who + "ranks are 0 to " + std::to_string(num_ranks_ - 1));
    } else if (joiners_[static_cast<size_t>(rank)].socket) {
      refuse(who + "another process has joined as this rank");
    } else if (packet.fds.size() != 1) {
      throw SystemError("did not receive the pidfd of rank " + std::to_string(rank) +
                        ": rank 0 may have too many open files (see ulimit -n)");
    } else {
      joiners_[static_cast<size_t>(rank)] = {
          .socket = std::move(peer.socket), .pidfd = std::move(packet.fds[0]), .pid = peer.pid};
    }
  } catch (const MalformedMessage&) {
    // Not a rank of pycoll: its socket closes here.
  }
}

void LocalGroupLeader::hear_joiner(int rank, const Deadline& deadline) {
  const Packet packet = receive_packet(joiners_[static_cast<size_t>(rank)].socket.get());
  try {
    WireReader reader(packet.bytes);
    if (reader.number<uint8_t>() == static_cast<uint8_t>(GroupPacket::kGiveUp)) {
      fail(timeout_after(reader.number<double>()));
    }
  } catch (const MalformedMessage&) {
    // An empty packet: the rank has left. Ranks send no malformed packets.
  }
  const GroupFailure death = death_of(rank);
  check_interrupt(deadline);  // a caller that watches the processes knows the rank's own number
  fail(death);
}

std::vector<pid_t> LocalGroupLeader::pids() const {
  std::vector<pid_t> pids;
  for (const Joiner& joiner : joiners_) pids.push_back(joiner.pid);
  return pids;
}

LocalGroup LocalGroupLeader::welcome_all(const Deadline& deadline, Pidfds known) {
  static_assert(1 + kMaxLocalRanks <= kMaxPacketFds);
  static_assert(kMaxLocalRanks * sizeof(int32_t) + 1 <= kMaxPacketBytes);
  WireWriter welcome;
  welcome.number(static_cast<uint8_t>(GroupPacket::kWelcome));
  std::vector<int> fds = {memory_.get()};
  for (const Joiner& joiner : joiners_) {
    welcome.number(static_cast<int32_t>(joiner.pid));
    if (known.empty()) fds.push_back(joiner.pidfd.get());
  }
  for (int rank = 1; rank < num_ranks_; ++rank) {
    const int socket = joiners_[static_cast<size_t>(rank)].socket.get();
    while (!send_packet(socket, welcome.bytes(), fds)) {
      // A rank that has just died does not stop the others: they hold its pidfd.
      if (errno == EPIPE || errno == ECONNRESET) break;
      // The kernel limits the descriptors in flight: wait until some have arrived.
      if (errno != ETOOMANYREFS && errno != EAGAIN) throw_system_error("send to a local rank");
      if (deadline.expired()) {
        throw SystemError("too many descriptors in flight to the other ranks for " +
                          format_seconds(deadline.timeout_s()) + " (see ulimit -n)");
      }
      pause_ms(1, deadline);
    }
  }
  LocalGroup group;
  group.memory = std::move(memory_);
  group.pids = pids();
  group.pidfds = std::move(known);
  if (!group.pidfds.empty()) return group;
  for (Joiner& joiner : joiners_) {
    group.pidfds.push_back(std::make_shared<const Fd>(std::move(joiner.pidfd)));
  }
  return group;
}

std::vector<int> LocalGroupLeader::missing_ranks() const {
  std::vector<int> missing;
  for (int rank = 1; rank < num_ranks_; ++rank) {
    if (!joiners_[static_cast<size_t>(rank)].socket) missing.push_back(rank);
  }
  return missing;
}

GroupFailure LocalGroupLeader::timeout_after(double timeout_s) const {
  return {.kind = GroupFailure::Kind::kTimeout,
          .text = did_not_join(missing_ranks(), num_ranks_, timeout_s)};
}

GroupFailure LocalGroupLeader::death_of(int rank) const {
  const Joiner& joiner = joiners_[static_cast<size_t>(rank)];
  const bool ended = ends_soon(joiner.pidfd.get());
  const int signal = ended ? exit_signal(joiner.pidfd.get()) : 0;
  std::string text = "rank " + std::to_string(rank) + " (process " + std::to_string(joiner.pid) +
                     (ended ? ") ended" : ") left") + " while the ranks of this host were joining";
  if (signal != 0) text += ", killed by signal " + std::to_string(signal);
  return {.kind = GroupFailure::Kind::kPeerDied, .text = text, .rank = rank, .signal = signal};
}

void LocalGroupLeader::blame_ended() {
  const std::vector<int> missing = missing_ranks();
  const auto& ended = silent_.ended();
  if (missing.empty() || ended.size() < missing.size()) return;
  const auto& [pid, signal] = ended.front();
  const std::string who =
      "rank " + std::to_string(missing.front()) + " (process " + std::to_string(pid) + ")";
  fail({.kind = GroupFailure::Kind::kPeerDied,
        .text = who + " ended before it said its rank, while the ranks of this host were joining",
        .rank = missing.front(),
        .signal = signal});
}

void LocalGroupLeader::check_interrupt(const Deadline& deadline) {
  try {
    deadline.check_interrupt();
  } catch (const PeerDiedError& death) {
    fail({.kind = GroupFailure::Kind::kPeerDied,
          .text = death.what(),
          .rank = death.rank(),
          .signal = death.signal()});
  }
}

void LocalGroupLeader::fail(const GroupFailure& failure) {
  const std::string packet = failure.to_bytes();
  for (const Joiner& joiner : joiners_) {
    if (joiner.socket) send_packet(joiner.socket.get(), packet, {});
  }
  accept_pending();
  for (const PendingPeer& peer : pending_) send_packet(peer.socket.get(), packet, {});
  failure.raise();
}

}  // namespace pycoll
