// Sizes of slots, of which the transport makes rings and the estimate makes tiles.
#pragma once

#include <cstddef>

namespace pycoll {

/// Fits into a core's L2 cache together with the user's tile.
inline constexpr size_t kSlotBytes = 128 << 10;
/// Where ranks are on several hosts. HostLevel::message_bytes says how much of it messages use.
inline constexpr size_t kSlotBytesBetweenHosts = 256 << 10;
/// Where in a page slots begin. Arrays often begin 16 or 64 bytes into a page, or at its start, and
/// rows of them some power of two further on: copies between places that are equal modulo a page,
/// or nearly so, may be slow (decision 0136).
inline constexpr size_t kSlotInPage = 1408;
/// Bytes of messages that a rank reads from all its peers before a slot's lines are written again:
/// four times an L2 cache, so that they have left the reader's (decision 0108).
inline constexpr size_t kBytesBetweenWrites = 4 << 20;
/// Places of messages that two ranks trade: those of the tiles that are in flight at once.
inline constexpr int kTradedPlaces = 4;

}  // namespace pycoll
