// The memory that the ranks of one communicator share, and where everything lies in it.
//
// One mapping serves all ranks: a control block, one record ring per rank, and for every ordered
// pair of ranks one link per protocol, plus one multicast ring per rank and protocol. The memory
// starts as zeros, which is a valid empty state, so nobody has to initialise it. Pages that no
// schedule touches are never backed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/protocol.h"
#include "transport/slot.h"

namespace pycoll {

/// What one rank said when it entered an operation; read by others when something is wrong.
struct CallRecord {
  uint64_t sequence = 0;  // of the operation in its communicator: 1, 2, ...
  uint8_t collective = 0;
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t num_dims = 0;
  int32_t root = 0;
  int64_t count = 0;
  int64_t shape[6] = {};
  char algorithm[24] = {};  // as asked for by the caller; empty: pycoll's choice

  /// What must agree between ranks, as 32 bits that are never 0.
  uint32_t digest() const;
};

enum class FailureCode : uint8_t { kNone, kTimeout, kPeerDied, kPeerLeft, kMismatch, kAborted };

/// Why a communicator broke. Packed into one word that the first rank to notice claims.
struct Failure {
  FailureCode code = FailureCode::kNone;
  uint8_t signal = 0;     // kPeerDied
  uint16_t reporter = 0;  // rank that noticed
  uint16_t culprit = 0;   // rank that it is about
  uint64_t pack() const;
  static Failure unpack(uint64_t word);
};

/// One rank's public state, on lines of its own.
struct alignas(kFlagBytes) RankControl {
  uint64_t state = 0;                     // 0: not there yet, 1: there, 2: left
  uint64_t sequence = 0;                  // newest record
  alignas(kFlagBytes) uint32_t bell = 0;  // futex word
  uint32_t asleep = 0;
};

/// What the maker of the memory decides for all ranks before any of them sees it, so that all
/// choose alike. Text follows, which comm/settings.h reads.
struct SegmentSettings {
  int32_t num_cores = 0;  // that the ranks may use, together
  uint32_t text_bytes = 0;
};

struct SegmentLayout {
  static SegmentLayout for_ranks(int num_ranks);

  int num_ranks = 1;
  int num_slots = kMaxSlots;
  size_t slot_bytes[kNumProtocols] = {};
  size_t total_bytes = 0;

  // Byte offsets from the start of the mapping.
  size_t controls = 0;
  size_t records = 0;
  size_t flags = 0;
  size_t slots = 0;
  size_t settings = 0;
};

/// A view of the mapping; owns nothing.
class Segment {
 public:
  static constexpr int kNumRecords = 32;  // per rank
  static constexpr size_t kSettingsBytes = size_t{1} << 20;
  static constexpr size_t kMaxSettingsText = kSettingsBytes - sizeof(SegmentSettings);

  Segment(std::byte* base, int num_ranks)
      : base_(base), layout_(SegmentLayout::for_ranks(num_ranks)) {}

  const SegmentLayout& layout() const { return layout_; }
  int num_ranks() const { return layout_.num_ranks; }

  uint64_t& failure_word() const { return *reinterpret_cast<uint64_t*>(base_); }
  RankControl& control(int rank) const;
  int num_cores() const;
  std::string_view settings_text() const;

  /// Link from src to dst, or src's multicast ring when dst == src.
  RingMemory ring(ProtocolKind protocol, int src, int dst) const;

  /// Writes the record of `rank` and its sequence number. One writer per rank.
  void publish(int rank, const CallRecord& record) const;
  /// Copies the record that `rank` published for `sequence`. False when it has not entered that
  /// operation yet, or is so far ahead that the record was reused.
  bool read_record(int rank, uint64_t sequence, CallRecord* record) const;

  /// Wakes `rank` if it sleeps.
  void ring_bell(int rank) const;
  void ring_all_bells() const;
  /// Breaks the communicator with this failure, unless it is already broken.
  void fail(const Failure& failure) const;

 private:
  std::byte* base_;
  SegmentLayout layout_;
};

}  // namespace pycoll
