#include "bootstrap/join/host_table.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>

#include "base/printable.h"
#include "bootstrap/join/serialize.h"
#include "bootstrap/local/process_info.h"

namespace pycoll {
namespace {

constexpr size_t kMaxNameBytes = 64;  // longest host name of Linux

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

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

HostTable find_hosts(const Exchange& exchange) {
  WireWriter own;
  const std::string id = host_id();
  own.text(id).text(id.substr(0, id.find('/'))).text(host_name()).text(own_cores());
  HostTable table;
  std::map<std::string, int> hosts;
  for (const std::string& bytes : exchange("places", own.bytes())) {
    WireReader reader(bytes);
    const std::string place(reader.text());
    table.boots.emplace_back(reader.text());
    const std::string name = printable(reader.text(), kMaxNameBytes);
    table.cores.emplace_back(reader.text());
    const auto [found, is_new] = hosts.emplace(place, table.num_hosts());
    if (is_new) table.names.push_back(name);
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
