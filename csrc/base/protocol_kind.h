// Protocols: how the bytes of a message and its flag travel. Transports and plans share these
// names; executor/protocol.h and executor/cpu/cpu_direct.h implement them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace pycoll {

enum class ProtocolKind : uint8_t {
  kSimple,  // bulk bytes, then one flag
  kLL,      // low latency: the flag inside each cache line
  kDirect,  // no slots: ranks read and write each other's arrays, where those are reachable
  kLL128,   // devices only: lines of 128 bytes, 8 of them the flag
  kPoison,  // devices only: the payload is its own flag
  kCopy,    // devices only: as kDirect, by the device's copy engines; moves, and no reductions
};
inline constexpr int kNumProtocols = 6;
// CPU protocols come first in the enum; the first ones among them pass messages through slots.
inline constexpr int kNumSlotProtocols = 2;

const char* protocol_name(ProtocolKind protocol);
std::optional<ProtocolKind> find_protocol(std::string_view name);
/// Raises UsageError listing the known names.
ProtocolKind protocol_from_name(std::string_view name);
/// The CPU protocols.
std::span<const ProtocolKind> protocols();
/// The device protocols: all of them.
std::span<const ProtocolKind> device_protocols();
bool is_cpu_protocol(ProtocolKind protocol);
/// Whether ranks access each other's arrays, and not slots.
inline bool is_direct(ProtocolKind protocol) {
  return protocol == ProtocolKind::kDirect || protocol == ProtocolKind::kCopy;
}
/// All names, for error messages: "simple, ll, direct, ...".
std::string_view protocol_names();

}  // namespace pycoll
