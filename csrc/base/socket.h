// Helpers for TCP and Unix sockets: waits with a deadline, and addresses.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/clock.h"

namespace pycoll {

/// The longest time between two calls of Deadline::check_interrupt() in a wait: a signal that
/// arrives just before poll() does not wake it.
inline constexpr int64_t kInterruptCheckNs = 20'000'000;

/// Waits until one of `fds` is ready, a signal arrives or `wait_ns` has passed. Returns the number
/// of ready descriptors.
int poll_fds(std::vector<pollfd>& fds, int64_t wait_ns);

/// Waits until `fd` is ready for `events` or has failed; false if the deadline passes first.
bool wait_for_fd(int fd, short events, const Deadline& deadline);

/// Sleeps before another attempt, but not beyond the deadline, then checks for interrupts.
void pause_ms(int pause_ms, const Deadline& deadline);

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  /// Whether this is 0.0.0.0 or ::, which mean every interface.
  bool is_any() const;
  /// Whether only this host reaches this address: 127.0.0.0/8, ::1.
  bool is_loopback() const;
  int port() const;
};

/// IPv4 and IPv6 addresses of `host`. Raises SystemError if there are none.
std::vector<SocketAddress> resolve_tcp(const std::string& host, int port);

/// The address that `fd` is bound to.
SocketAddress local_address(int fd);

/// The address that `fd` is connected to as text, "10.0.0.2:40312"; "?" if it is not connected.
std::string peer_text(int fd);

/// Whether `fd` is connected to itself: on loopback, a client that tries a port without a listener
/// may get that port as its own, and TCP then connects the socket to itself.
bool is_connected_to_itself(int fd);

/// "127.0.0.1:29500" or "[::1]:29500".
std::string join_host_port(const std::string& host, int port);

}  // namespace pycoll
