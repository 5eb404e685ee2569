// Sizes of slots, of which the transport makes rings and the estimate makes tiles.
#pragma once

#include <cstddef>

namespace pycoll {

/// Fits into a core's L2 cache together with the user's tile.
inline constexpr size_t kSlotBytes = 128 << 10;
/// Where each host has one rank: no ranks share a cache, and a link has to be full for longer than
/// a flight takes.
inline constexpr size_t kSlotBytesBetweenHosts = 256 << 10;

}  // namespace pycoll
