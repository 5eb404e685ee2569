// This rank's ends of all rings of one protocol.
#pragma once

#include <vector>

#include "transport/proxy/proxy.h"
#include "transport/ring/segment.h"
#include "transport/ring/traded_places.h"

namespace pycoll {

struct Links {
  Links(const Segment& segment, int rank, ProtocolKind protocol, size_t checksum_bytes = 0)
      : checksum_bytes(checksum_bytes), rank(rank), protocol(protocol) {
    const int n = segment.num_ranks();
    if (n == 2 && protocol == ProtocolKind::kSimple) {
      // The multicast rings, which two ranks do not use.
      const auto bank = [&](int of) { return segment.ring(protocol, of, of).slots; };
      traded = TradedPlaces(bank(rank), bank(1 - rank), segment.layout().slot_bytes[0]);
    }
    for (int peer = 0; peer < n; ++peer) {
      send.emplace_back(segment.ring(protocol, rank, peer));
      RingMemory from = segment.ring(protocol, peer, rank);
      if (const Proxy* proxy = segment.proxy()) from.elsewhere = proxy->elsewhere(protocol, peer);
      recv.emplace_back(from, 0);
      // A multicast ring is the link of a rank to itself, with one head per other rank.
      RingMemory ring = segment.ring(protocol, peer, peer);
      ring.num_heads = n - 1;
      if (peer == rank) send_multicast = SendEnd(ring);
      recv_multicast.emplace_back(ring, rank < peer ? rank : rank - 1);
    }
  }

  /// Begins a call of two ranks that trades places.
  void begin_trading_call() {
    const auto peer = static_cast<size_t>(1 - rank);
    traded.begin_call(send[peer], recv[peer]);
  }

  /// Links that write slots past the caches try the caches with their next slot.
  void try_caches() {
    send_multicast.stores().try_caches();
    for (SendEnd& link : send) link.stores().try_caches();
  }

  TradedPlaces traded;                  // of two ranks
  std::vector<SendEnd> send;            // by destination rank
  std::vector<RecvEnd> recv;            // by source rank
  SendEnd send_multicast;               // read by all other ranks
  std::vector<RecvEnd> recv_multicast;  // by source rank
  size_t checksum_bytes = 0;            // behind the payload; 0: there is no checksum
  int rank;
  ProtocolKind protocol;
};

}  // namespace pycoll
