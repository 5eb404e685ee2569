// Addresses at which other hosts may reach this one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/socket.h"

namespace pycoll {

struct InterfaceAddress {
  std::string interface;
  std::string text;  // "10.0.0.1", "fd00::1"
  SocketAddress address;
};

/// Addresses of the interfaces that are up: IPv4 before IPv6, without loopback and without
/// addresses that need a scope. `filter` chooses interfaces as NCCL_SOCKET_IFNAME does: "eth,ib"
/// takes names that begin with these, "=eth0,eth1" takes exactly these names, "^docker,lo" and
/// "^=lo" take all other interfaces. Empty: all. Loopback counts if the filter names it, or if the
/// host has no network. Raises UsageError, listing the interfaces, if none is left.
std::vector<InterfaceAddress> interface_addresses(const std::string& filter);

/// Whether the filter accepts this interface.
bool interface_matches(const std::string& filter, std::string_view name);

}  // namespace pycoll
