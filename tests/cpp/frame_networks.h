// Networks of a frame check: what a test sends as a rank of another host, this process receives
// through a real wire.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/net/tcp_wire.h"

namespace pycoll {

class FrameNetwork {
 public:
  virtual ~FrameNetwork() = default;
  /// The wire of rank 0, in a world of `num_ranks`. Call once.
  virtual std::unique_ptr<Wire> make_wire(const std::vector<int>& peers, int num_ranks) = 0;
  /// Sends bytes as rank `peer`. False if they do not all fit now; `sent` counts those that did.
  virtual bool send(int peer, const std::string& bytes, size_t* sent) = 0;
  /// Returns what rank 0 has sent to `peer` since the last call.
  virtual std::string received(int peer) = 0;
  /// The peer reads no more.
  virtual void stop_reading(int peer) = 0;
  /// Ends all links, from the side of the peers.
  virtual void end() = 0;
};

/// TCP's framing, over pairs of sockets.
class SocketNetwork final : public FrameNetwork {
 public:
  std::unique_ptr<Wire> make_wire(const std::vector<int>& peers, int num_ranks) override {
    std::vector<Channel> channels(static_cast<size_t>(num_ranks));
    ends_.resize(static_cast<size_t>(num_ranks));
    for (const int peer : peers) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
        throw_system_error("socketpair");
      }
      channels[static_cast<size_t>(peer)] = Channel(Fd(ends[0]));
      ends_[static_cast<size_t>(peer)] = Fd(ends[1]);
    }
    return std::make_unique<TcpWire>(std::move(channels));
  }
  bool send(int peer, const std::string& bytes, size_t* sent) override {
    const ssize_t now = ::send(ends_[static_cast<size_t>(peer)].get(), bytes.data() + *sent,
                               bytes.size() - *sent, MSG_NOSIGNAL);
    if (now > 0) *sent += static_cast<size_t>(now);
    if (now < 0 && errno != EAGAIN) *sent = bytes.size();  // rank 0 has closed the link
    return *sent == bytes.size();
  }
  std::string received(int peer) override {
    std::string bytes;
    char part[8192];
    for (;;) {
      const ssize_t now = ::recv(ends_[static_cast<size_t>(peer)].get(), part, sizeof(part), 0);
      if (now <= 0) return bytes;
      bytes.append(part, static_cast<size_t>(now));
    }
  }
  void stop_reading(int) override {}  // it reads in received() only
  void end() override { ends_.clear(); }

 private:
  std::vector<Fd> ends_;
};

/// MPI's framing, over an MPI that exists in this process only; null if the build has no header of
/// the standard ABI (tests/cpp/fake_mpi.cc).
std::unique_ptr<FrameNetwork> make_mpi_network();

}  // namespace pycoll
