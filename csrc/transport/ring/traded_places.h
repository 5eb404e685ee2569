// Places of messages that the two directions of a link share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/slot_bytes.h"
#include "transport/ring/slot.h"

namespace pycoll {

/// Where two ranks that send each other equally many messages write them: in two banks of places,
/// which they trade after each call, and after each round of places. So a rank writes a message to
/// where it has read one before. It has those lines in its own cache already, while those that it
/// has written itself are in its peer's (decision 0122).
///
/// Flags, marks and credits are those of the two rings. They cannot show whether a place is free,
/// but this rank's own reads do: before message c of a call is written, it has read the peer's
/// message c - kTradedPlaces of the same call, which was there, and all messages of earlier calls.
/// A call trades only where that holds in the ranks' programs (may_trade_places() in plan/plan.h).
class TradedPlaces {
 public:
  TradedPlaces() = default;
  /// `own_bank`: where this rank writes first; its peer writes first in `peer_bank`. Each has
  /// kTradedPlaces times `place_bytes`.
  TradedPlaces(std::byte* own_bank, std::byte* peer_bank, size_t place_bytes)
      : banks_{own_bank, peer_bank}, place_bytes_(place_bytes) {}

  /// Call it before each call that trades places. Such calls are the same on both ranks.
  void begin_call(const SendEnd& send, const RecvEnd& recv) {
    turn_ += num_rounds_;
    num_rounds_ = 0;
    sent_before_ = send.sequence();
    read_before_ = recv.sequence();
  }
  /// The place of the message being written, and of the one being read.
  std::byte* of(const SendEnd& send) { return place(0, send.sequence() - sent_before_); }
  std::byte* of(const RecvEnd& recv) { return place(1, recv.sequence() - read_before_); }

 private:
  std::byte* place(uint64_t writer, uint64_t count) {
    const uint64_t round = count / kTradedPlaces;
    num_rounds_ = std::max(num_rounds_, round + 1);
    return banks_[(turn_ + round + writer) % 2] + count % kTradedPlaces * place_bytes_;
  }

  std::byte* banks_[2] = {nullptr, nullptr};
  size_t place_bytes_ = 0;
  uint64_t turn_ = 0;
  uint64_t num_rounds_ = 0;  // of this call
  uint64_t sent_before_ = 0;
  uint64_t read_before_ = 0;
};

}  // namespace pycoll
