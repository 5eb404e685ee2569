// Matches messages with receives: keeps unexpected messages and posted receives.
//
// Messages of one source and tag are matched in the order in which they were sent. If several
// receives match a message, the one posted first takes it.
#pragma once

#include <compare>
#include <map>
#include <memory>
#include <vector>

#include "p2p/message.h"

namespace pycoll {

/// A message that came before its receive.
struct Unexpected {
  int source = 0;
  int32_t tag = 0;
  DType dtype = DType::kU8;
  uint16_t dtype_hash = 0;
  size_t nbytes = 0;
  bool announced = false;                         // the bytes are still in the sender's memory
  bool blocking = false;                          // the sender waits
  uint64_t send_id = 0;                           // announced: id of the send
  uint64_t address = 0;                           // announced: address at the sender
  bool on_device = false;                         // announced: it is that of a DeviceOffer
  std::unique_ptr<std::byte[]> bytes = nullptr;   // not announced: the bytes
  bool counted = false;                           // counts in the sender's budget of eager bytes
  std::shared_ptr<MessageOp> arriving = nullptr;  // receives in parts into `bytes`; null: complete
};

class MessageQueue {
 public:
  /// Number of announced messages whose senders wait.
  int num_held_senders() const { return num_held_senders_; }
  void add(Unexpected message) {
    if (message.announced && message.blocking) ++num_held_senders_;
    const Key key{message.source, message.tag, ++num_arrived_};
    unexpected_.emplace(key, std::move(message));
  }
  /// Removes the oldest message from `source` (or from any of `num_ranks`) with this tag. False:
  /// there is none.
  bool take(int source, int32_t tag, int num_ranks, Unexpected* message);
  /// Calls `visit` for each announced message of a waiting sender. `visit` may take the message
  /// over by setting announced = false.
  template <class Visit>
  void for_each_held(Visit&& visit) {
    for (auto& [key, message] : unexpected_) {
      if (!message.announced || !message.blocking) continue;
      visit(message);
      if (!message.announced) --num_held_senders_;
    }
  }

  void post(MessageOp* op) { posted_.push_back(op); }
  /// Removes and returns the oldest receive that matches a message of this source and tag; null:
  /// none.
  MessageOp* match(int source, int32_t tag);
  std::vector<MessageOp*>& posted() { return posted_; }
  const std::vector<MessageOp*>& posted() const { return posted_; }

 private:
  struct Key {
    int source;
    int32_t tag;
    uint64_t arrival;
    auto operator<=>(const Key&) const = default;
  };

  std::map<Key, Unexpected> unexpected_;
  std::vector<MessageOp*> posted_;
  uint64_t num_arrived_ = 0;
  int num_held_senders_ = 0;
};

}  // namespace pycoll
