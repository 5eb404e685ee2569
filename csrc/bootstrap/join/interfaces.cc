#include "bootstrap/join/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace pycoll {
namespace {

bool needs_scope(const SocketAddress& address) {
  if (address.family() != AF_INET6) return false;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
}

struct Found {
  InterfaceAddress address;
  bool loopback;
};

std::vector<Found> all_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw_system_error("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<Found> found;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    InterfaceAddress address;
    address.interface = one->ifa_name;
    address.address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.address.storage, one->ifa_addr, address.address.length);
    if (needs_scope(address.address)) continue;
    char text[INET6_ADDRSTRLEN] = {};
    const void* bytes =
        family == AF_INET
            ? static_cast<const void*>(
                  &reinterpret_cast<const sockaddr_in*>(&address.address.storage)->sin_addr)
            : &reinterpret_cast<const sockaddr_in6*>(&address.address.storage)->sin6_addr;
    ::inet_ntop(family, bytes, text, sizeof(text));
    address.text = text;
    found.push_back({std::move(address), (one->ifa_flags & IFF_LOOPBACK) != 0});
  }
  std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return a.address.address.family() == AF_INET && b.address.address.family() != AF_INET;
  });
  return found;
}

}  // namespace

bool interface_matches(const std::string& filter, std::string_view name) {
  std::string_view rest = filter;
  const bool excludes = rest.starts_with('^');
  if (excludes) rest.remove_prefix(1);
  const bool exact = rest.starts_with('=');
  if (exact) rest.remove_prefix(1);
  bool named = false;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view one = rest.substr(0, comma);
    named = named || (!one.empty() && (exact ? name == one : name.starts_with(one)));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return named != excludes;
}

std::vector<InterfaceAddress> interface_addresses(const std::string& filter) {
  const std::vector<Found> found = all_addresses();
  const bool names_some = !filter.empty() && filter.front() != '^';
  std::vector<InterfaceAddress> chosen;
  for (const Found& one : found) {
    if (one.loopback && !names_some) continue;
    if (!filter.empty() && !interface_matches(filter, one.address.interface)) continue;
    chosen.push_back(one.address);
  }
  if (chosen.empty() && filter.empty()) {
    for (const Found& one : found) chosen.push_back(one.address);
  }
  if (!chosen.empty()) return chosen;
  std::string names;
  for (const Found& one : found) {
    names += (names.empty() ? "" : ", ") + one.address.interface + " (" + one.address.text + ")";
  }
  throw UsageError("no interface that is up and has an address matches PYCOLL_IFNAME=" + filter +
                   "; interfaces found: " + (names.empty() ? "none" : names));
}

}  // namespace pycoll
