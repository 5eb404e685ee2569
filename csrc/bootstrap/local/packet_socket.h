// Abstract Unix sockets that carry whole packets and file descriptors between processes of a host.
// An abstract name is no entry in any file system: it ends with its socket.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"

namespace pycoll {

/// Linux passes at most this many descriptors with one message (SCM_MAX_FD).
inline constexpr int kMaxPacketFds = 253;
inline constexpr size_t kMaxPacketBytes = 8192;

struct Packet {
  std::string bytes;      // empty: the other end has closed
  std::vector<Fd> fds;    // close-on-exec
  bool lost_fds = false;  // some did not fit into this process's table of descriptors
};

/// Listens at the abstract name `name`. Raises SystemError.
Fd listen_at(const std::string& name);

/// Connects without waiting; an empty Fd, and errno, when nobody listens or the queue is full.
Fd connect_at(const std::string& name);

/// Accepts a connection; an empty Fd when there is none. Raises SystemError.
Fd accept_from(int listener);

/// True when the process at the other end belongs to our user. `pid` is its process id.
bool is_own_user(int socket, pid_t* pid);

/// Sends one packet without waiting; false, and errno, when it could not be sent.
bool send_packet(int socket, std::string_view bytes, const std::vector<int>& fds);

/// Receives one packet of a socket that is ready. A broken connection reads as a closed one.
Packet receive_packet(int socket);

}  // namespace pycoll
