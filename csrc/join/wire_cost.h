// What messages to another host take: measured on the wire, before anything else uses it.
#pragma once

#include "base/clock.h"
#include "topology/topology.h"
#include "transport/net/wire.h"

namespace pycoll {

/// Messages there and back between this rank and `peer`, which both call this; one of them leads
/// and gets the result. Cost: some 16 flights, then as many bytes as take 5 ms, at most 32 MiB.
/// Raises PeerDiedError and TimeoutError, naming the peer.
NetworkCost measure_wire(Wire& wire, int peer, bool leads, const Deadline& deadline);

}  // namespace pycoll
