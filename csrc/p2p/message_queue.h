// What a rank has been sent and has not asked for, and what it has asked for and not been sent.
//
// Messages of one source and tag meet receives in the order in which they were sent; receives that
// several could take meet them in the order in which they were posted.
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
  size_t nbytes = 0;
  bool announced = false;                         // the bytes are still the sender's
  bool blocking = false;                          // the sender waits
  uint64_t send_id = 0;                           // announced
  uint64_t address = 0;                           // announced
  std::unique_ptr<std::byte[]> bytes = nullptr;   // else: here
  bool counted = false;                           // against the sender's budget of eager bytes
  std::shared_ptr<MessageOp> arriving = nullptr;  // else: on their way into `bytes`
};

class MessageQueue {
 public:
  /// Announced messages whose senders wait.
  int num_held_senders() const { return num_held_senders_; }
  void add(Unexpected message) {
    if (message.announced && message.blocking) ++num_held_senders_;
    const Key key{message.source, message.tag, ++num_arrived_};
    unexpected_.emplace(key, std::move(message));
  }
  /// The oldest message from `source` (or from any of `num_ranks`) with this tag, taken out.
  bool take(int source, int32_t tag, int num_ranks, Unexpected* message);
  /// Shows those of num_held_senders() to `visit`, which may take them over (announced = false).
  template <class Visit>
  void for_each_held(Visit&& visit) {
    for (auto& [key, message] : unexpected_) {
      if (!message.announced || !message.blocking) continue;
      visit(message);
      if (!message.announced) --num_held_senders_;
    }
  }

  void post(MessageOp* op) { posted_.push_back(op); }
  /// The oldest receive that takes a message of this source and tag, taken out; null: none.
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
