// Measures the network cost of messages to another host, before the wire has other uses.
#pragma once

#include "base/clock.h"
#include "topology/topology.h"
#include "transport/net/wire.h"

namespace pycoll {

/// Measures round trips between this rank and `peer`, which both call this; the one with `leads`
/// gets the result. Takes 16 round trips, then as many bytes as take 5 ms, at most 32 MiB. Raises
/// PeerDiedError and TimeoutError, naming the peer.
NetworkCost measure_wire(Wire& wire, int peer, bool leads, const Deadline& deadline);

}  // namespace pycoll
