#include "bootstrap/local/local_group.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/ending.h"
#include "base/error.h"
#include "base/socket.h"
#include "bootstrap/join/joining.h"
#include "bootstrap/local/local_group_leader.h"
#include "bootstrap/local/local_group_messages.h"
#include "bootstrap/local/packet_socket.h"
#include "bootstrap/local/process_info.h"
#include "bootstrap/security/sha256.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

PeerDiedError leader_is_gone(const Deadline& deadline) {
  // Rank 0 may have left because another rank has ended.
  for (const int64_t end = now_ns() + kEndingNs; now_ns() < end; ::usleep(1000)) {
    deadline.check_interrupt();
  }
  return PeerDiedError("rank 0 left while the ranks of this host were joining", 0, 0);
}

Fd connect_to_leader(const std::string& socket_name, int num_ranks, const Deadline& deadline) {
  for (int pause = 1;; pause = std::min(2 * pause, 50)) {
    Fd socket = connect_at(socket_name);
    pid_t pid = -1;
    // A socket of another user under this name must not get the token.
    if (socket && is_own_user(socket.get(), &pid)) return socket;
    if (deadline.expired()) {
      throw TimeoutError(did_not_join({0}, num_ranks, deadline.timeout_s()));
    }
    pause_ms(pause, deadline);
  }
}

void send_hello(int socket, int rank, int num_ranks, size_t shared_bytes, const std::string& token,
                const Deadline& deadline) {
  WireWriter hello;
  hello.number(static_cast<uint8_t>(GroupPacket::kHello)).text(token);
  hello.number(static_cast<int32_t>(rank)).number(static_cast<int32_t>(num_ranks));
  hello.number(static_cast<uint64_t>(shared_bytes));
  const Fd own_pidfd = open_own_pidfd();
  while (!send_packet(socket, hello.bytes(), {own_pidfd.get()})) {
    if (errno == EPIPE || errno == ECONNRESET) throw leader_is_gone(deadline);
    // EAGAIN, ETOOMANYREFS: the leader has not yet read earlier packets.
    if (errno != EAGAIN && errno != ETOOMANYREFS) throw_system_error("send to local rank 0");
    if (deadline.expired())
      throw TimeoutError("rank 0 did not read this rank's hello within " +
                         format_seconds(deadline.timeout_s()));
    pause_ms(1, deadline);
  }
}

LocalGroup read_welcome(Packet packet, WireReader& reader, int num_ranks, size_t shared_bytes,
                        Pidfds known) {
  const size_t num_fds = known.empty() ? 1 + static_cast<size_t>(num_ranks) : 1;
  if (packet.lost_fds || packet.fds.size() != num_fds) {
    throw SystemError(
        "received " + std::to_string(packet.fds.size()) + " of " + std::to_string(num_fds) +
        " descriptors from rank 0: this process may have too many open files (see ulimit -n)");
  }
  LocalGroup group;
  group.memory = std::move(packet.fds[0]);
  for (int rank = 0; rank < num_ranks; ++rank) group.pids.push_back(reader.number<int32_t>());
  group.pidfds = std::move(known);
  for (size_t i = 1; i < num_fds; ++i) {
    group.pidfds.push_back(std::make_shared<const Fd>(std::move(packet.fds[i])));
  }
  reader.expect_end();
  struct stat memory = {};
  if (::fstat(group.memory.get(), &memory) != 0) throw_system_error("fstat of the shared memory");
  if (static_cast<size_t>(memory.st_size) != shared_bytes) {
    throw SystemError("the shared memory has " + std::to_string(memory.st_size) + " bytes, not " +
                      std::to_string(shared_bytes));
  }
  return group;
}

LocalGroup follow(const std::string& socket_name, int rank, int num_ranks, size_t shared_bytes,
                  const std::string& token, const Deadline& deadline, Pidfds known) {
  const Fd socket = connect_to_leader(socket_name, num_ranks, deadline);
  send_hello(socket.get(), rank, num_ranks, shared_bytes, token, deadline);
  if (!wait_for_fd(socket.get(), POLLIN, deadline)) {
    // Only the leader knows which ranks are missing.
    WireWriter give_up;
    give_up.number(static_cast<uint8_t>(GroupPacket::kGiveUp)).number(deadline.timeout_s());
    send_packet(socket.get(), give_up.bytes(), {});
    if (!wait_for_fd(socket.get(), POLLIN, Deadline::after_s(kLastWordSeconds))) {
      throw TimeoutError(did_not_join({0}, num_ranks, deadline.timeout_s()));
    }
  }
  Packet packet = receive_packet(socket.get());
  if (packet.bytes.empty()) throw leader_is_gone(deadline);
  try {
    const std::string bytes = packet.bytes;
    WireReader reader(bytes);
    const auto kind = static_cast<GroupPacket>(reader.number<uint8_t>());
    if (kind == GroupPacket::kFailure) GroupFailure::from(reader).raise();
    if (kind != GroupPacket::kWelcome) throw MalformedMessage();
    return read_welcome(std::move(packet), reader, num_ranks, shared_bytes, std::move(known));
  } catch (const MalformedMessage&) {
    throw SystemError("rank 0 sent a malformed message at '" + socket_name +
                      "': run the same version of pycoll on all ranks");
  }
}

/// Name of the group's socket. Each split adds to the name of the group, and the system's limit is
/// 107 bytes, so a long name is replaced by its hash.
std::string socket_name_of(const std::string& name) {
  constexpr size_t kMaxReadable = 90;
  if (name.size() <= kMaxReadable) return "pycoll-" + name;
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "pycoll-#";
  for (const uint8_t byte : sha256(name)) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

}  // namespace

LocalGroup form_local_group(const std::string& name, int rank, int num_ranks, size_t shared_bytes,
                            const std::string& token, const Deadline& deadline,
                            const PrepareMemory& prepare, Pidfds known) {
  if (num_ranks < 1 || num_ranks > kMaxLocalRanks) {
    throw UsageError("a local group has 1 to " + std::to_string(kMaxLocalRanks) + " ranks, not " +
                     std::to_string(num_ranks));
  }
  if (rank < 0 || rank >= num_ranks) {
    throw UsageError("rank " + std::to_string(rank) + " does not exist among " +
                     std::to_string(num_ranks) + " ranks: expected 0 to " +
                     std::to_string(num_ranks - 1));
  }
  check_token(token);
  const std::string socket_name = socket_name_of(name);
  if (rank != 0) {
    return follow(socket_name, rank, num_ranks, shared_bytes, token, deadline, std::move(known));
  }
  LocalGroupLeader leader(socket_name, num_ranks, shared_bytes, token);
  return leader.form(deadline, prepare, std::move(known));
}

}  // namespace pycoll
