// Places of messages that the two directions of a link share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/slot_bytes.h"
#include "transport/ring/slot.h"

namespace pycoll {

/// Where two ranks that send each other equally many messages write them: in two banks of places,
/// which they trade after each round of kTradedPlaces messages. So a rank writes a message to where
/// it has read one before. It has those lines in its own cache already, while those that it has
/// written itself are in its peer's (decision 0122).
///
/// Flags, marks and credits are those of the two rings. They cannot show whether a place is free,
/// but this rank's own reads do. Messages are numbered through all calls that trade. The place of
/// message c had the peer's message c - kTradedPlaces, which this rank has read: it has read all
/// messages of earlier calls, and a call trades only where its program has read it, too
/// (may_trade_places() in plan/plan.h). Before that, it had message c - 2 kTradedPlaces of this
/// rank, which the peer had read before it wrote its own, for the same reason.
class TradedPlaces {
 public:
  TradedPlaces() = default;
  /// `own_bank`: where this rank writes first; its peer writes first in `peer_bank`. Each has
  /// kTradedPlaces times `place_bytes`.
  TradedPlaces(std::byte* own_bank, std::byte* peer_bank, size_t place_bytes)
      : banks_{own_bank, peer_bank}, place_bytes_(place_bytes) {}

  /// Call it before each call that trades places. Such calls are the same on both ranks.
  void begin_call(const SendEnd& send, const RecvEnd& recv) {
    num_before_ += num_of_call_;
    num_of_call_ = 0;
    sent_before_ = send.sequence();
    read_before_ = recv.sequence();
  }
  /// The place of the message being written, and of the one being read.
  std::byte* of(const SendEnd& send) { return place(0, send.sequence() - sent_before_); }
  std::byte* of(const RecvEnd& recv) { return place(1, recv.sequence() - read_before_); }

 private:
  std::byte* place(uint64_t writer, uint64_t count) {
    num_of_call_ = std::max(num_of_call_, count + 1);
    const uint64_t number = num_before_ + count;
    const uint64_t round = number / kTradedPlaces;
    return banks_[(round + writer) % 2] + number % kTradedPlaces * place_bytes_;
  }

  std::byte* banks_[2] = {nullptr, nullptr};
  size_t place_bytes_ = 0;
  uint64_t num_before_ = 0;   // messages of earlier calls, in each direction
  uint64_t num_of_call_ = 0;  // so far
  uint64_t sent_before_ = 0;
  uint64_t read_before_ = 0;
};

}  // namespace pycoll
