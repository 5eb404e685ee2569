// The addresses under which other hosts may reach this one.
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

/// Addresses of the interfaces that are up: IPv4 before IPv6, none of loopback, none that needs a
/// scope. `filter` chooses interfaces as NCCL_SOCKET_IFNAME does: "eth,ib" those whose names begin
/// so, "=eth0,eth1" those with exactly these names, "^docker,lo" and "^=lo" all others. Empty: all.
/// Of a host without any network, and where the filter names it, loopback counts.
/// Raises UsageError, listing the interfaces, when none is left.
std::vector<InterfaceAddress> interface_addresses(const std::string& filter);

/// Whether the filter lets this interface through.
bool interface_matches(const std::string& filter, std::string_view name);

}  // namespace pycoll
