// Records of every rank's last operations, in memory that other ranks and `pycoll doctor` can read.
//
// One rank writes its records and names; any number of readers read at any time and never wait.
// docs/memory_model.md argues why read() never returns a half-written record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/ring/slot.h"

namespace pycoll {

/// One operation of one rank: two cache lines. Names are ids in the rank's NameTable.
struct CallRecord {
  static constexpr uint8_t kDeterministic = 1;
  static constexpr uint8_t kHasCounts = 2;  // blocks of different sizes: `count` is unused
  static constexpr uint8_t kShapesMayDiffer = 4;
  static constexpr uint8_t kOnDevice = 8;  // its arrays are on a device; finished at its launch

  uint64_t sequence = 0;  // number of the operation in its communicator: 1, 2, ...
  uint64_t entered = 0;   // ticks (base/ticks.h)
  uint64_t finished = 0;  // ticks; 0 while it runs; see failed()
  uint8_t collective = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t num_dims = 0;
  uint8_t flags = 0;
  uint8_t unused = 0;
  uint16_t site = 0;          // the user's file and line
  uint32_t digest = 0;        // of the fields that must be equal on all ranks; never 0
  uint16_t element_size = 0;  // bytes; 65535 also stands for more
  int16_t root = 0;           // of a rooted collective
  uint16_t asked = 0;         // the algorithm that the caller asked for; 0: pycoll's choice
  uint16_t chosen = 0;        // the algorithm/protocol that runs
  uint32_t counts_hash = 0;   // of the ranks' block sizes, where they differ
  uint32_t asked_hash = 0;
  uint32_t chosen_hash = 0;
  int64_t count = 0;  // elements of a block; bytes for a dtype outside the table
  int64_t shape[6] = {};
  uint32_t dtype_hash = 0;  // of the description of a dtype outside the table
  uint16_t dtype_text = 0;  // the description
  uint16_t spare = 0;       // pads to two cache lines
  uint64_t more_spare = 0;

  /// Computes `digest` from the other fields.
  uint32_t compute_digest() const;

  bool failed() const { return (finished & kFailed) != 0; }
  uint64_t finished_ticks() const { return finished & ~kFailed; }
  static constexpr uint64_t kFailed = uint64_t{1} << 63;
};
static_assert(sizeof(CallRecord) == 128);

/// Whether a record of another host may be kept: its numbers are within the tables that they index.
bool is_valid(const CallRecord& record);

/// A 32-bit hash of a text that ranks compare; 0 for an empty text.
uint32_t hash_text(std::string_view text);
uint32_t hash_counts(const int64_t* counts, int num_counts);

/// The last operations of one rank: a view of memory that it does not own.
class RecordRing {
 public:
  static constexpr size_t kNumRecords = 1024;
  static constexpr size_t kBytes = kNumRecords * sizeof(CallRecord);

  explicit RecordRing(std::byte* base) : words_(reinterpret_cast<uint64_t*>(base)) {}

  /// Writes a record over the one that is kNumRecords older.
  void write(const CallRecord& record) const;
  /// Records the end of the operation, at these ticks.
  void finish(uint64_t sequence, uint64_t ticks) const {
    store_release(at(sequence)[kFinishedWord], ticks);
  }
  /// Updates the record after another algorithm was chosen.
  void rewrite_chosen(const CallRecord& record) const;
  /// Copies the record of `sequence`. False if it is not written yet or was replaced.
  bool read(uint64_t sequence, CallRecord* record) const;
  /// Returns only the digest of the record; 0 if the record does not exist.
  uint32_t read_digest(uint64_t sequence) const;
  /// Prefetches the record of `sequence` for writing.
  void warm(uint64_t sequence) const {
    prefetch_for_write(at(sequence));
    prefetch_for_write(at(sequence) + kNumWords / 2);
  }

 private:
  static constexpr size_t kNumWords = sizeof(CallRecord) / sizeof(uint64_t);
  static constexpr size_t kFinishedWord = offsetof(CallRecord, finished) / sizeof(uint64_t);

  uint64_t* at(uint64_t sequence) const { return words_ + sequence % kNumRecords * kNumWords; }

  uint64_t* words_;
};

/// Names that one rank's records refer to: algorithms, and places in the user's code. Names are
/// only added, so an id read from a record stays valid. A view of memory that it does not own.
class NameTable {
 public:
  static constexpr uint16_t kNumNames = 1024;
  static constexpr uint16_t kReason = kNumNames - 1;  // why the rank broke the communicator
  static constexpr size_t kNameBytes = 128;
  static constexpr size_t kMaxText = kNameBytes - sizeof(uint64_t);
  static constexpr size_t kBytes = kNumNames * kNameBytes;

  explicit NameTable(std::byte* base) : base_(base) {}

  /// Writes the name with this id, 1 .. kNumNames - 1. A long text is cut to its end.
  void write(uint16_t id, std::string_view text) const;
  /// Returns the name; empty for id 0 and for ids not written. It lives as long as the mapping.
  std::string_view read(uint16_t id) const;

 private:
  std::byte* at(uint16_t id) const { return base_ + id * kNameBytes; }

  std::byte* base_;
};

}  // namespace pycoll
