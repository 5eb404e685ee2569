#include "base/protocol_kind.h"

#include <string>

#include "base/error.h"

namespace pycoll {
namespace {

struct Row {
  ProtocolKind kind;
  const char* name;
};
// In the order of the enumerators.
constexpr Row kRows[] = {{ProtocolKind::kSimple, "simple"}, {ProtocolKind::kLL, "ll"},
                         {ProtocolKind::kDirect, "direct"}, {ProtocolKind::kLL128, "ll128"},
                         {ProtocolKind::kPoison, "poison"}, {ProtocolKind::kCopy, "copy"}};
constexpr ProtocolKind kAll[] = {ProtocolKind::kSimple, ProtocolKind::kLL,
                                 ProtocolKind::kDirect, ProtocolKind::kLL128,
                                 ProtocolKind::kPoison, ProtocolKind::kCopy};
constexpr int kNumCpuProtocols = 3;
static_assert(std::size(kRows) == kNumProtocols && std::size(kAll) == kNumProtocols);

}  // namespace

const char* protocol_name(ProtocolKind protocol) {
  return kRows[static_cast<size_t>(protocol)].name;
}

std::optional<ProtocolKind> find_protocol(std::string_view name) {
  for (const Row& row : kRows) {
    if (name == row.name) return row.kind;
  }
  return std::nullopt;
}

ProtocolKind protocol_from_name(std::string_view name) {
  if (const auto found = find_protocol(name)) return *found;
  throw UsageError("unknown protocol '" + std::string(name) + "': expected one of " +
                   std::string(protocol_names()));
}

std::span<const ProtocolKind> protocols() { return std::span(kAll).first<kNumCpuProtocols>(); }

std::span<const ProtocolKind> device_protocols() { return kAll; }

bool is_cpu_protocol(ProtocolKind protocol) {
  return static_cast<int>(protocol) < kNumCpuProtocols;
}

std::string_view protocol_names() { return "simple, ll, direct, ll128, poison, copy"; }

}  // namespace pycoll
