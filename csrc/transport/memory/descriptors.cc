#include "transport/memory/descriptors.h"

#include <poll.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "bootstrap/local/packet_socket.h"

namespace pycoll {
namespace {

constexpr int kLookPeriodMs = 20;

/// The secret, unguessable address at which a rank listens.
struct Address {
  uint8_t secret[16];

  std::string name() const {
    constexpr const char* kDigits = "0123456789abcdef";
    std::string text = "pycoll-descriptors-";
    for (const uint8_t byte : secret) text += {kDigits[byte >> 4], kDigits[byte & 15]};
    return text;
  }
};

void raise_missing(Transport& transport, const std::vector<bool>& came, const Deadline& deadline) {
  for (int rank = 0; rank < transport.num_ranks(); ++rank) {
    if (came[static_cast<size_t>(rank)]) continue;
    if (const std::optional<int> signal = transport.ended_by(rank, Look::kQuick)) {
      throw PeerDiedError("the process of rank " + std::to_string(rank) +
                              " ended while the ranks exchanged handles of device memory",
                          rank, *signal);
    }
    if (deadline.expired()) {
      throw TimeoutError("rank " + std::to_string(transport.rank()) +
                         " waited for a handle of device memory from rank " + std::to_string(rank));
    }
  }
  deadline.check_interrupt();
}

}  // namespace

std::vector<Fd> pass_descriptors(Transport& transport, int own, const AllGather& gather,
                                 const Deadline& deadline) {
  const auto n = static_cast<size_t>(transport.num_ranks());
  const auto self = static_cast<size_t>(transport.rank());
  Address mine;
  if (::getrandom(mine.secret, sizeof(mine.secret), 0) != sizeof(mine.secret)) {
    throw_system_error("getrandom");
  }
  const Fd listener = listen_at(mine.name());
  std::vector<Address> addresses(n);
  gather(&mine, addresses.data(), sizeof(mine));  // afterwards all ranks listen
  const auto rank_text = [](size_t rank) { return std::string(1, static_cast<char>(rank)); };
  for (size_t peer = 0; peer < n; ++peer) {
    if (peer == self) continue;
    // The receiver can read the packet even after this socket is closed.
    const Fd socket = connect_at(addresses[peer].name());
    if (!socket || !send_packet(socket.get(), rank_text(self), {own})) {
      // A rank that has ended is reported below, by all ranks that wait for its descriptor.
      if (!transport.ended_by(static_cast<int>(peer), Look::kQuick)) {
        throw_system_error("passing a handle of device memory to rank " + std::to_string(peer));
      }
    }
  }
  std::vector<Fd> received(n);
  std::vector<bool> came(n, false);
  came[self] = true;
  for (size_t num_missing = n - 1; num_missing != 0;) {
    pollfd look{listener.get(), POLLIN, 0};
    ::poll(&look, 1, kLookPeriodMs);
    Fd socket = accept_from(listener.get());
    if (!socket) {
      raise_missing(transport, came, deadline);
      continue;
    }
    pid_t pid = 0;
    if (!is_own_user(socket.get(), &pid)) continue;
    pollfd ready{socket.get(), POLLIN, 0};
    ::poll(&ready, 1, kLookPeriodMs);  // the packet follows the connection at once
    Packet packet = receive_packet(socket.get());
    if (packet.lost_fds)
      throw SystemError(
          "cannot receive a handle of device memory: this process may have too many open files "
          "(see ulimit -n)");
    if (packet.bytes.size() != 1 || packet.fds.size() != 1) continue;
    const auto rank = static_cast<size_t>(static_cast<uint8_t>(packet.bytes[0]));
    if (rank >= n || came[rank]) continue;
    came[rank] = true;
    received[rank] = std::move(packet.fds[0]);
    --num_missing;
  }
  return received;
}

}  // namespace pycoll
