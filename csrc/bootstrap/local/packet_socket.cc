#include "bootstrap/local/packet_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace pycoll {
namespace {

constexpr int kLocalBacklog = 128;

struct AbstractAddress {
  explicit AbstractAddress(const std::string& name) {
    if (name.empty() || name.size() > sizeof(address.sun_path) - 1) {
      throw UsageError("the name '" + name + "' of a Unix socket must have 1 to " +
                       std::to_string(sizeof(address.sun_path) - 1) + " bytes");
    }
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());  // after '\0': abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address = {};
  socklen_t length = 0;
};

Fd new_socket(int type) {
  Fd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_system_error("socket");
  return socket;
}

}  // namespace

Fd listen_at(const std::string& name, int type) {
  const AbstractAddress address(name);
  Fd socket = new_socket(type);
  if (::bind(socket.get(), address.get(), address.length) != 0 ||
      ::listen(socket.get(), kLocalBacklog) != 0) {
    throw_system_error("cannot listen at the abstract Unix socket '" + name + "'");
  }
  return socket;
}

Fd connect_at(const std::string& name, int type) {
  const AbstractAddress address(name);
  Fd socket = new_socket(type);
  if (::connect(socket.get(), address.get(), address.length) == 0) return socket;
  const int error = errno;
  socket.reset();
  errno = error;
  return socket;
}

Fd accept_from(int listener) {
  Fd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    throw_system_error("accept on a Unix socket");
  }
  return socket;
}

bool is_own_user(int socket, pid_t* pid) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return false;
  *pid = credentials.pid;
  return credentials.uid == ::geteuid();
}

bool send_packet(int socket, std::string_view bytes, const std::vector<int>& fds) {
  iovec part = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxPacketFds * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

Packet receive_packet(int socket) {
  Packet packet;
  packet.bytes.resize(kMaxPacketBytes);
  iovec part = {.iov_base = packet.bytes.data(), .iov_len = packet.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxPacketFds * sizeof(int))];
  msghdr message = {};
  ssize_t received = -1;
  // A peer that closed without reading all packets causes ECONNRESET once. Packets that it sent
  // before can still be read, so try again.
  for (int attempt = 0; received < 0 && attempt < 3; ++attempt) {
    message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  }
  packet.bytes.resize(received > 0 ? static_cast<size_t>(received) : 0);
  if (received < 0) return packet;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t num_fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < num_fds; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
      packet.fds.emplace_back(fd);
    }
  }
  packet.lost_fds = (message.msg_flags & MSG_CTRUNC) != 0;
  return packet;
}

}  // namespace pycoll
