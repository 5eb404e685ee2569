// How processes end.
#pragma once

#include <cstdint>

namespace pycoll {

/// A process that ends closes its sockets before its pidfd shows the end: by microseconds, on a
/// busy machine by milliseconds. A rank whose peer has left waits so long for the death of another
/// rank to show before it takes the peer's leaving for the cause.
inline constexpr int64_t kEndingNs = 50'000'000;

}  // namespace pycoll
