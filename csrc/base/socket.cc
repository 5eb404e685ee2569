#include "base/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/error.h"
#include "base/printable.h"

namespace pycoll {
namespace {

timespec to_timespec(int64_t ns) {
  ns = std::max<int64_t>(ns, 0);
  return {.tv_sec = static_cast<time_t>(ns / 1'000'000'000),
          .tv_nsec = static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace

int poll_fds(std::vector<pollfd>& fds, int64_t wait_ns) {
  const timespec timeout = to_timespec(wait_ns);
  const int num_ready = ::ppoll(fds.data(), fds.size(), &timeout, nullptr);
  if (num_ready >= 0) return num_ready;
  if (errno != EINTR) throw_system_error("poll");
  for (pollfd& fd : fds) fd.revents = 0;
  return 0;
}

bool wait_for_fd(int fd, short events, const Deadline& deadline) {
  std::vector<pollfd> fds = {{.fd = fd, .events = events, .revents = 0}};
  while (true) {
    // Read before the last poll, so that a descriptor that is ready at the deadline still counts.
    const int64_t remaining_ns = deadline.remaining_ns();
    if (poll_fds(fds, std::min(remaining_ns, kInterruptCheckNs)) > 0) return true;
    deadline.check_interrupt();
    if (remaining_ns <= 0) return false;
  }
}

void pause_ms(int pause_ms, const Deadline& deadline) {
  const int64_t pause_ns =
      std::min<int64_t>(int64_t{pause_ms} * 1'000'000, deadline.remaining_ns());
  const timespec pause = to_timespec(pause_ns);
  ::nanosleep(&pause, nullptr);
  deadline.check_interrupt();
}

bool SocketAddress::is_any() const {
  if (family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == htonl(INADDR_ANY);
  }
  const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
  if (IN6_IS_ADDR_UNSPECIFIED(&address)) return true;
  const uint8_t mapped_any[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0};
  return std::memcmp(address.s6_addr, mapped_any, sizeof(mapped_any)) == 0;
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET) {
    const in_addr& address = reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr;
    return ntohl(address.s_addr) >> 24 == 127;
  }
  const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address);
}

int SocketAddress::port() const {
  return ntohs(family() == AF_INET ? reinterpret_cast<const sockaddr_in*>(&storage)->sin_port
                                   : reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
}

std::vector<SocketAddress> resolve_tcp(const std::string& host, int port) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) {
    throw SystemError("the address '" + printable(host, kShownBytes) + "' does not resolve: " +
                      (code == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(code)) +
                      ": check MASTER_ADDR, or the address that was passed to grow or join");
  }
  std::vector<SocketAddress> addresses;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    SocketAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    address.length = one->ai_addrlen;
  }
  ::freeaddrinfo(found);
  if (addresses.empty()) throw SystemError("the address '" + host + "' has no IPv4 or IPv6 form");
  return addresses;
}

SocketAddress local_address(int fd) {
  SocketAddress address;
  address.length = sizeof(address.storage);
  if (::getsockname(fd, address.get(), &address.length) != 0) throw_system_error("getsockname");
  return address;
}

std::string peer_text(int fd) {
  SocketAddress peer;
  peer.length = sizeof(peer.storage);
  if (::getpeername(fd, peer.get(), &peer.length) != 0) return "?";
  char text[INET6_ADDRSTRLEN] = {};
  const bool is_ipv4 = peer.family() == AF_INET;
  const void* bytes =
      is_ipv4 ? static_cast<const void*>(&reinterpret_cast<sockaddr_in*>(&peer.storage)->sin_addr)
              : &reinterpret_cast<sockaddr_in6*>(&peer.storage)->sin6_addr;
  ::inet_ntop(peer.family(), bytes, text, sizeof(text));
  return join_host_port(text, peer.port());
}

bool is_connected_to_itself(int fd) {
  const SocketAddress own = local_address(fd);
  SocketAddress peer;
  peer.length = sizeof(peer.storage);
  if (::getpeername(fd, peer.get(), &peer.length) != 0) return false;
  return own.length == peer.length && std::memcmp(&own.storage, &peer.storage, own.length) == 0;
}

std::string join_host_port(const std::string& host, int port) {
  const bool bare_ipv6 = host.find(':') != std::string::npos;
  return (bare_ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

}  // namespace pycoll
