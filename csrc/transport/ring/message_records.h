// Records of every rank's last sends and receives: as transport/ring/records.h, for point-to-point
// messages, which are not in the sequence of collectives.
//
// One thread of the rank writes at a time; any number of readers read at any time and never wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "transport/ring/record_limits.h"
#include "transport/ring/slot.h"

namespace pycoll {

/// One send or receive of one rank, on one cache line.
struct alignas(64) MessageRecord {
  static constexpr uint8_t kSend = 1;
  static constexpr uint8_t kBlocking = 2;  // the caller waits until it is over
  static constexpr uint64_t kFailed = uint64_t{1} << 63;
  static constexpr int16_t kNobody = -1;

  uint64_t number = 0;    // of the message on its rank and communicator: 1, 2, ...
  uint64_t entered = 0;   // ticks (base/ticks.h)
  uint64_t finished = 0;  // ticks; 0 while in progress; see failed()
  uint64_t nbytes = 0;
  int32_t tag = 0;
  int16_t peer = 0;          // given by the caller; kNobody: any source
  int16_t source = kNobody;  // of a receive: the sender of its message
  uint16_t site = 0;         // id in the rank's NameTable: the user's file and line
  uint8_t dtype = 0;
  uint8_t flags = 0;

  bool is_send() const { return (flags & kSend) != 0; }
  bool failed() const { return (finished & kFailed) != 0; }
  uint64_t finished_ticks() const { return finished & ~kFailed; }
};
static_assert(sizeof(MessageRecord) == 64);

/// Whether a record of another host may be kept, in a communicator of `num_ranks`.
inline bool is_valid(const MessageRecord& record, int num_ranks) {
  return record.number < kMaxRecordNumber && record.dtype < kNumRecordedDTypes &&
         record.peer >= MessageRecord::kNobody && record.peer < num_ranks &&
         record.source >= MessageRecord::kNobody && record.source < num_ranks;
}

/// The last messages of one rank: a view of memory that it does not own.
class MessageRing {
 public:
  static constexpr size_t kNumRecords = 1024;
  static constexpr size_t kBytes = kNumRecords * sizeof(MessageRecord);

  explicit MessageRing(std::byte* base) : words_(reinterpret_cast<uint64_t*>(base)) {}

  /// Writes a record over the one that is kNumRecords older.
  void write(const MessageRecord& record) const {
    uint64_t* to = at(record.number);
    // As in RecordRing, a record without a number is invalid, so the number is written last.
    store_release(to[0], 0);
    for (size_t i = 1; i < kNumWords; ++i) store_release(to[i], word(record, i));
    store_release(to[0], record.number);
  }
  /// Records the end of the message, at these ticks.
  void finish(uint64_t number, uint64_t ticks) const {
    uint64_t* to = at(number);
    // A newer record may have replaced this one while its message was in progress.
    if (load_acquire(to[0]) == number) store_release(to[kFinishedWord], ticks);
  }
  /// Records the source of a receive's message; leaves the rest of the record unchanged.
  void set_source(const MessageRecord& record) const {
    uint64_t* to = at(record.number);
    if (load_acquire(to[0]) == record.number)
      store_release(to[kSourceWord], word(record, kSourceWord));
  }
  /// Copies the record of `number`. False if it is not written yet or was replaced.
  bool read(uint64_t number, MessageRecord* record) const {
    const uint64_t* from = at(number);
    uint64_t words[kNumWords];
    words[0] = load_acquire(from[0]);
    if (words[0] != number || number == 0) return false;
    for (size_t i = 1; i < kNumWords; ++i) words[i] = load_acquire(from[i]);
    if (load_acquire(from[0]) != number) return false;
    *record = {};
    std::memcpy(static_cast<void*>(record), words, sizeof(words));
    return true;
  }
  /// Prefetches the record of `number` for writing.
  void warm(uint64_t number) const { prefetch_for_write(at(number)); }

 private:
  static constexpr size_t kNumWords = 6;  // words in use; the rest is padding
  static constexpr size_t kLineWords = sizeof(MessageRecord) / sizeof(uint64_t);

  static constexpr size_t kFinishedWord = offsetof(MessageRecord, finished) / sizeof(uint64_t);
  static constexpr size_t kSourceWord = offsetof(MessageRecord, source) / sizeof(uint64_t);

  static uint64_t word(const MessageRecord& record, size_t i) {
    uint64_t found;
    std::memcpy(&found, reinterpret_cast<const std::byte*>(&record) + i * sizeof(found),
                sizeof(found));
    return found;
  }
  uint64_t* at(uint64_t number) const { return words_ + number % kNumRecords * kLineWords; }

  uint64_t* words_;
};

}  // namespace pycoll
