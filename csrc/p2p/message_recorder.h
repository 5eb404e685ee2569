// Records the messages of this rank in the memory that all ranks share.
#pragma once

#include "base/ticks.h"
#include "p2p/message.h"
#include "transport/ring/segment.h"

namespace pycoll {

/// Used by one thread at a time, like the engine that owns it.
class MessageRecorder {
 public:
  MessageRecorder(const Segment& segment, int rank)
      : ring_(segment.messages(rank)),
        newest_(segment.control(rank).message_number),
        number_(load_acquire(newest_)),
        steady_counter_(has_steady_counter()) {}

  /// Records the begin of an operation, and sets its number.
  void begin(MessageOp& op) {
    entered_ = read_ticks(steady_counter_);
    op.number = ++number_;
    MessageRecord record = record_of(op);
    record.entered = entered_;
    // The source of a receive is its peer; kAnySource until a message has matched.
    if (!op.is_send) record.source = record.peer;
    ring_.write(record);
    store_release(newest_, number_);
    ring_.warm(number_ + 1);
    beginning_ = true;
  }
  /// Marks the end of the call that began the operation.
  void begun() { beginning_ = false; }
  /// Records the end of an operation. A small one that ends within its first call gets its begin as
  /// its end, which saves reading the clock.
  void end(const MessageOp& op) {
    if (op.number == 0) return;
    if (op.peer < 0) ring_.set_source(record_of(op));
    const uint64_t now =
        beginning_ && op.nbytes <= kQuickBytes ? entered_ : read_ticks(steady_counter_);
    ring_.finish(op.number, op.error ? now | MessageRecord::kFailed : now);
  }

 private:
  static constexpr size_t kQuickBytes = 1 << 10;

  static MessageRecord record_of(const MessageOp& op) {
    MessageRecord record;
    record.number = op.number;
    record.nbytes = op.array_bytes();
    record.tag = op.tag;
    record.peer = static_cast<int16_t>(op.peer);
    record.source = static_cast<int16_t>(op.source);
    record.site = op.site;
    record.dtype = static_cast<uint8_t>(op.dtype);
    record.flags = static_cast<uint8_t>((op.is_send ? MessageRecord::kSend : 0) |
                                        (op.blocking ? MessageRecord::kBlocking : 0));
    return record;
  }

  const MessageRing ring_;
  uint64_t& newest_;
  uint64_t number_;
  uint64_t entered_ = 0;
  bool beginning_ = false;
  const bool steady_counter_;
};

}  // namespace pycoll
