// Abstract Unix sockets between processes of a host: streams, and sockets that carry whole packets
// and file descriptors. The kernel says which user the other end belongs to. An abstract name is
// not in any file system: it disappears with its socket.
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"

namespace pycoll {

/// Linux passes at most this many descriptors with one message (SCM_MAX_FD).
inline constexpr int kMaxPacketFds = 253;
inline constexpr size_t kMaxPacketBytes = 8192;

struct Packet {
  std::string bytes;      // empty: the other end has closed the connection
  std::vector<Fd> fds;    // close-on-exec
  bool lost_fds = false;  // some did not fit into this process's table of descriptors
};

/// Listens at the abstract name `name`. Raises SystemError.
Fd listen_at(const std::string& name, int type = SOCK_SEQPACKET);

/// Connects without waiting. Returns an empty Fd and sets errno if there is no listener or its
/// queue is full.
Fd connect_at(const std::string& name, int type = SOCK_SEQPACKET);

/// Accepts a connection; an empty Fd if there is none. Raises SystemError.
Fd accept_from(int listener);

/// Whether the process at the other end belongs to this user. Sets `pid` to its process id.
bool is_own_user(int socket, pid_t* pid);

/// Sends one packet without waiting. Returns false and sets errno on failure.
bool send_packet(int socket, std::string_view bytes, const std::vector<int>& fds);

/// Receives one packet from a ready socket. A broken connection counts as closed.
Packet receive_packet(int socket);

}  // namespace pycoll
