// How processes and joins end.
#pragma once

#include <cstdint>

namespace pycoll {

/// A process that ends closes its sockets before its pidfd shows the end: by microseconds, on a
/// busy machine by milliseconds. A rank whose peer has left waits so long for the death of another
/// rank to show before it takes the peer's leaving for the cause.
inline constexpr int64_t kEndingNs = 50'000'000;

/// After a failed join, how long the rank that knows the reason tells it, and how long the other
/// ranks try to learn it.
inline constexpr double kLastWordSeconds = 2;

}  // namespace pycoll
