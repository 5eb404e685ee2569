// One authenticated TCP connection between every two ranks that do not share a host.
//
// The lower of two ranks listens at all addresses of its host that other hosts may reach. The
// higher one tries them all at once and keeps the first that answers. Both prove that they know the
// session's key by an HMAC over fresh random numbers of both ends. The key itself never travels,
// and an unauthenticated peer learns nothing, not even a proof. Afterwards no rank listens.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "bootstrap/security/channel.h"

namespace pycoll {

/// Sockets that listen at this host's addresses, for this rank alone.
class MeshListeners {
 public:
  /// PYCOLL_IFNAME restricts the interfaces, and PYCOLL_PORTS ("20000-20100") the ports.
  MeshListeners();

  /// The addresses and ports, for connect_mesh on other ranks.
  std::string to_bytes() const;
  const std::vector<Fd>& sockets() const { return sockets_; }

 private:
  std::vector<Fd> sockets_;
  std::vector<std::string> addresses_;
  std::vector<int> ports_;
};

struct MeshRank {
  bool is_remote = false;  // it runs on another host and needs a connection
  std::string listeners;   // its MeshListeners::to_bytes()
  std::string host;        // the name of its host
};

/// Returns one channel for each remote rank, by rank, with TCP_NODELAY. `encrypted`, identical on
/// all ranks, turns on TLS with the same key. Raises TimeoutError naming a rank that could not be
/// reached and the addresses tried.
std::vector<Channel> connect_mesh(const MeshListeners& listeners, int rank,
                                  const std::vector<MeshRank>& ranks, std::string_view key,
                                  bool encrypted, const Deadline& deadline);

}  // namespace pycoll
