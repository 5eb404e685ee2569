// Protocols: how the bytes of a message and its flag travel. Named here, below transports and plans
// alike; what each does is in executor/protocol.h and executor/cpu/cpu_direct.h.
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
  kLL128,   // of devices: lines of 128 bytes, of which 8 are flag
  kPoison,  // of devices: the payload is its own flag
};
inline constexpr int kNumProtocols = 5;
// Of those of hosts, which come first, the first ones pass messages through slots.
inline constexpr int kNumSlotProtocols = 2;

const char* protocol_name(ProtocolKind protocol);
std::optional<ProtocolKind> find_protocol(std::string_view name);
/// Raises UsageError listing the known names.
ProtocolKind protocol_from_name(std::string_view name);
/// Those of hosts.
std::span<const ProtocolKind> protocols();
/// All: those of devices.
std::span<const ProtocolKind> device_protocols();
bool is_of_hosts(ProtocolKind protocol);
/// For messages: "simple, ll, direct, ...".
std::string_view protocol_names();

}  // namespace pycoll
