// One authenticated TCP connection between every two ranks that do not share a host.
//
// Of two ranks the lower one listens, at all addresses under which others may reach its host; the
// higher one tries them all at once and keeps the first that answers. Both prove that they know the
// session's key, by an HMAC over fresh random numbers of both: the key itself never travels, and a
// stranger learns nothing, not even a proof. Afterwards nobody listens any more.
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
  /// PYCOLL_IFNAME chooses interfaces, PYCOLL_PORTS ("20000-20100") ports; else the system does.
  MeshListeners();

  /// For connect_mesh of the others.
  std::string to_bytes() const;
  const std::vector<Fd>& sockets() const { return sockets_; }

 private:
  std::vector<Fd> sockets_;
  std::vector<std::string> addresses_;
  std::vector<int> ports_;
};

struct MeshRank {
  bool is_remote = false;  // it runs on another host: a connection is wanted
  std::string listeners;   // its MeshListeners::to_bytes()
  std::string host;        // what its host is called
};

/// One channel for each remote rank, without delay (TCP_NODELAY); by rank. `encrypted`: by TLS,
/// with the same key, alike on all ranks. Raises TimeoutError naming a rank that could not be
/// reached and what was tried.
std::vector<Channel> connect_mesh(const MeshListeners& listeners, int rank,
                                  const std::vector<MeshRank>& ranks, std::string_view key,
                                  bool encrypted, const Deadline& deadline);

}  // namespace pycoll
