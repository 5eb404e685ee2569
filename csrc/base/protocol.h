// Protocols: how the bytes of a message and its flag travel. Named here, below transports and plans
// alike; what each does is in executor/protocol.h and executor/direct.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace pycoll {

enum class ProtocolKind : uint8_t {
  kSimple,  // bulk bytes, then one flag
  kLL,      // low latency: the flag inside each cache line
  kDirect,  // no slots: ranks read and write each other's arrays, where they can reach them
};
inline constexpr int kNumProtocols = 3;
// Those whose messages pass through slots come first.
inline constexpr int kNumSlotProtocols = 2;

const char* protocol_name(ProtocolKind protocol);
std::optional<ProtocolKind> find_protocol(std::string_view name);
/// Raises UsageError listing the known names.
ProtocolKind protocol_from_name(std::string_view name);
std::span<const ProtocolKind> protocols();
/// Those that work for arrays anywhere.
std::span<const ProtocolKind> slot_protocols();
/// For messages: "simple, ll, direct".
std::string_view protocol_names();

}  // namespace pycoll
