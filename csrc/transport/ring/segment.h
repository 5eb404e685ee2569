// The memory that the ranks of one communicator share, and its layout.
//
// One mapping serves all ranks: a header, a control block, one ring of records and one table of
// names per rank, and for every ordered pair of ranks one link per protocol, plus one multicast
// ring per rank and protocol. The memory starts as zeros, which is a valid empty state, so no
// rank has to initialize it. Pages that are never touched use no physical memory.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/protocol_kind.h"
#include "base/ticks.h"
#include "transport/memory/peer_memory.h"
#include "transport/ring/exchange_lines.h"
#include "transport/ring/mailbox.h"
#include "transport/ring/message_records.h"
#include "transport/ring/record_limits.h"
#include "transport/ring/records.h"
#include "transport/ring/slot.h"

namespace pycoll {

/// Maximum number of ranks of a communicator: it has n * n rings, and each rank proves the programs
/// of all ranks.
inline constexpr int kMaxRanks = 256;
using RankSet = std::bitset<kMaxRanks>;
/// Raises UsageError unless `num_ranks` is from 1 to kMaxRanks.
void check_num_ranks(int num_ranks);

enum class FailureCode : uint8_t {
  kNone,
  kTimeout,
  kPeerDied,
  kPeerLeft,
  kMismatch,
  kAborted,
  kMessageMismatch,  // a receive and its message differ in size or dtype
  kRevoked,          // the reporter called abort(), or one of its threads failed
  kCorrupted,        // bytes from the culprit had another checksum when the reporter read them
};
inline constexpr FailureCode kLastFailureCode = FailureCode::kCorrupted;

/// Why a communicator broke; packed into one word, which the first rank that notices claims.
struct Failure {
  FailureCode code = FailureCode::kNone;
  uint8_t signal = 0;     // kPeerDied
  uint16_t reporter = 0;  // rank that noticed the failure
  uint16_t culprit = 0;   // rank that caused it
  // mark_of() the reporter's message that failed; kRevoked: NameTable::kReason. 0: none
  uint16_t message = 0;
  uint64_t pack() const;
  static Failure unpack(uint64_t word);
  /// The value of `message` for a message's number.
  static uint16_t mark_of(uint64_t number) {
    return static_cast<uint16_t>(number == 0 ? 0 : 1 + number % 0xffff);
  }
};

/// The start of the first page, by which a reader of another version recognizes the mismatch.
struct SegmentHeader {
  static constexpr uint64_t kMagic = 0x6c6c6f63'79702121;  // "!!pycoll"
  // Version of the segment and of the frames between hosts. Raise it with each change: ranks with
  // different versions refuse to form a world.
  static constexpr uint64_t kVersion = 12;
  static constexpr size_t kMaxName = 512;

  uint64_t magic = 0;
  uint64_t version = 0;
  uint64_t num_ranks = 0;
  uint64_t total_bytes = 0;
  uint64_t several_hosts = 0;  // 1: the ranks are on several hosts
  // A moment on both clocks, from which readers convert ticks to time. The rank that claims
  // `tick_claim` writes it.
  uint64_t tick_claim = 0;
  uint64_t tick_ticks = 0;
  uint64_t tick_ns = 0;  // written last: not 0 once the moment is valid
  uint64_t name_claim = 0;
  uint64_t name_size = 0;
  char name[kMaxName] = {};  // of the group: the job's name, then the splits
  alignas(kFlagBytes) uint64_t failure = 0;
};

/// A message that did not match its receive. The receiver writes it before it breaks the
/// communicator.
struct MessageMismatch {
  int32_t source = 0;
  int32_t tag = 0;
  uint64_t sent_bytes = 0;
  uint64_t expected_bytes = 0;
  uint8_t sent_dtype = 0;
  uint8_t expected_dtype = 0;
};

/// Whether a mismatch of another host may be kept.
inline bool is_valid(const MessageMismatch& mismatch, int num_ranks) {
  return mismatch.source >= 0 && mismatch.source < num_ranks &&
         mismatch.sent_dtype < kNumRecordedDTypes && mismatch.expected_dtype < kNumRecordedDTypes;
}

/// One rank's public state, on cache lines that it shares with no other rank.
struct alignas(kFlagBytes) RankControl {
  uint64_t state = 0;                     // 0: not joined, 1: joined, 2: left
  uint64_t sequence = 0;                  // number of the newest record
  uint64_t pid = 0;                       // in the rank's own pid namespace
  uint64_t thread_id = 0;                 // thread that created the communicator
  uint64_t stack_signal = 0;              // signal that makes the process write its stacks; 0: none
  uint64_t stack_fd = 0;                  // descriptor of the process to which it writes them
  uint64_t message_number = 0;            // number of the newest message record
  alignas(kFlagBytes) uint32_t bell = 0;  // futex word
  uint32_t asleep = 0;
  uint32_t message_bell = 0;  // as `bell`, for the thread that progresses asynchronous messages
  uint32_t message_asleep = 0;
  // During a slow wait: the rank that must act, plus 1, and the time of the last check for dead
  // peers. Ranks that are shutting down skip this check.
  uint64_t waits_for = 0;
  uint64_t looked_ns = 0;
};

/// Settings that the creator of the memory writes before any other rank maps it, so that all ranks
/// make identical choices. A text follows, which comm/settings.h reads.
struct SegmentSettings {
  int32_t num_cores = 0;  // cores that at least one rank may use
  uint32_t text_bytes = 0;
};

struct SegmentLayout {
  /// `several_hosts`: the ranks are on several hosts. Slots are then larger, for long flights.
  static SegmentLayout for_ranks(int num_ranks, bool several_hosts = false);
  /// Names the layouts of all sizes: SegmentHeader::kVersion, and a digest of sizes and offsets,
  /// which notices a change without a new version. Identical on all machines.
  static std::string name();

  int num_ranks = 1;
  bool several_hosts = false;
  int num_slots = kMaxSlots;
  size_t slot_bytes[kNumSlotProtocols] = {};
  size_t stride_bytes[kNumSlotProtocols] = {};  // RingMemory
  size_t turn_bytes[kNumSlotProtocols] = {};
  size_t total_bytes = 0;

  // Byte offsets from the start of the mapping.
  size_t controls = 0;
  size_t records = 0;
  size_t names = 0;
  size_t exchanges = 0;
  size_t flags = 0;
  size_t slots = 0;
  size_t short_slots = 0;
  size_t settings = 0;
  size_t message_records = 0;
  size_t message_ends = 0;  // per rank: PeerMemoryAddress, MessageMismatch
  size_t mailboxes = 0;
};

class Proxy;

/// A view of the mapping, which it does not own.
class Segment {
 public:
  static constexpr size_t kSettingsBytes = size_t{1} << 20;
  static constexpr size_t kMaxSettingsText = kSettingsBytes - sizeof(SegmentSettings);

  Segment(std::byte* base, int num_ranks, bool several_hosts = false)
      : base_(base), layout_(SegmentLayout::for_ranks(num_ranks, several_hosts)) {}

  const SegmentLayout& layout() const { return layout_; }
  int num_ranks() const { return layout_.num_ranks; }

  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  uint64_t& failure_word() const { return header().failure; }
  RankControl& control(int rank) const;
  int num_cores() const;
  bool ranks_share_cores() const { return num_ranks() > num_cores(); }
  std::string_view settings_text() const;

  /// The proxy for ranks of other hosts; null if there are none. Ringing the bell of such a rank
  /// calls the proxy instead.
  Proxy* proxy() const { return proxy_; }
  void set_proxy(Proxy* proxy) { proxy_ = proxy; }
  ExchangeMemory& exchange(int rank) const;

  /// Link from src to dst, or src's multicast ring when dst == src.
  RingMemory ring(ProtocolKind protocol, int src, int dst) const;

  RecordRing records(int rank) const;
  MessageRing messages(int rank) const {
    return MessageRing(base_ + layout_.message_records +
                       static_cast<size_t>(rank) * MessageRing::kBytes);
  }
  NameTable names(int rank) const;

  /// Writes the header. Every rank calls it before anything else, with the same name.
  void introduce(std::string_view name) const;
  /// Converts the ticks of records to nanoseconds of CLOCK_MONOTONIC.
  TickScale tick_scale() const;
  /// The messages from src to dst (transport/ring/mailbox.h).
  MailboxMemory mailbox(int src, int dst) const {
    return MailboxLayout::at(base_ + layout_.mailboxes, num_ranks(), src, dst);
  }
  PeerMemoryAddress* peer_memory_addresses() const {
    return reinterpret_cast<PeerMemoryAddress*>(base_ + layout_.message_ends);
  }
  MessageMismatch& message_mismatch(int rank) const {
    return reinterpret_cast<MessageMismatch*>(peer_memory_addresses() + num_ranks())[rank];
  }

  /// Writes the record of `rank` and its sequence number. One writer per rank.
  void publish(int rank, const CallRecord& record) const {
    records(rank).write(record);
    store_release(control(rank).sequence, record.sequence);
  }

  /// Wakes `rank` if it sleeps.
  void ring_bell(int rank) const;
  /// As ring_bell(), for a message; also wakes the thread that progresses asynchronous messages.
  void ring_message_bell(int rank) const;
  /// Sleeps for at most a millisecond; if `listens`, the bell for messages ends the sleep.
  void nap_for_message(int rank, bool listens) const;
  void ring_all_bells() const;
  /// Breaks the communicator with this failure, unless it is already broken.
  void fail(const Failure& failure) const;
  /// Breaks the communicator for a reason that `rank`, of this process, gives in words.
  void revoke(int rank, std::string_view reason) const;

 private:
  std::byte* base_;
  SegmentLayout layout_;
  Proxy* proxy_ = nullptr;
};

}  // namespace pycoll
