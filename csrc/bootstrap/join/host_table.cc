#include "bootstrap/join/host_table.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>

#include "bootstrap/join/build.h"
#include "bootstrap/local/process_info.h"

namespace pycoll {
namespace {

std::string own_cores() {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  ::sched_getaffinity(0, sizeof(usable), &usable);
  std::string bits(sizeof(usable), '\0');
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable)) {
      char& byte = bits[static_cast<size_t>(core) / 8];
      byte = static_cast<char>(byte | 1 << core % 8);
    }
  }
  bits.erase(bits.find_last_not_of('\0') + 1);
  return bits;
}

}  // namespace

HostTable find_hosts(const Exchange& exchange, const std::string& layout) {
  WireWriter own;
  Build::own(layout).write(own);
  const std::string id = host_id();
  own.text(id).text(id.substr(0, id.find('/'))).text(own_cores());
  const std::vector<std::string> all = exchange("places", own.bytes());
  std::vector<WireReader> readers(all.begin(), all.end());
  std::vector<Build> builds;
  for (WireReader& reader : readers) builds.push_back(Build::read(reader));
  check_builds(builds);
  HostTable table;
  std::map<std::string, int> hosts;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string place(readers[rank].text());
    table.boots.emplace_back(readers[rank].text());
    table.cores.emplace_back(readers[rank].text());
    const auto [found, is_new] = hosts.emplace(place, table.num_hosts());
    if (is_new) table.names.push_back(builds[rank].host);
    table.host_of.push_back(found->second);
  }
  return table;
}

int HostTable::num_cores(const std::vector<int>& ranks) const {
  std::map<std::string, std::string> usable;
  for (const int rank : ranks) {
    const std::string& more = cores[static_cast<size_t>(rank)];
    std::string& bits = usable[boots[static_cast<size_t>(rank)]];
    bits.resize(std::max(bits.size(), more.size()), '\0');
    for (size_t i = 0; i < more.size(); ++i) bits[i] = static_cast<char>(bits[i] | more[i]);
  }
  int total = 0;
  for (const auto& [boot, bits] : usable) {
    for (const char byte : bits) total += std::popcount(static_cast<uint8_t>(byte));
  }
  return std::max(total, 1);
}

}  // namespace pycoll
