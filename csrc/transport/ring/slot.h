// The acquire and release operations of the host's rings, and the two ends of a ring of slots.
//
// A ring carries messages from one writer to one reader (a link) or to all other ranks (multicast).
// Invariants (docs/memory_model.md has the argument):
//   - only the writer advances `tail`, only reader i advances `heads[i]`; both only grow;
//   - message k is written to slot k % num_slots only when every head has passed k - num_slots (a
//     credit); a call may use fewer slots of its rings (SlotUse), short slots, of which there are
//     more, or places that both directions of a link share (traded_places.h);
//   - bytes written before `tail` is released are read only after `tail` is acquired, and bytes
//     read before a head is released are overwritten only after that head is acquired.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/peer_stores.h"
#include "base/prefetch.h"

namespace pycoll {

// Two cache lines: the adjacent-line prefetcher of x86 pairs them, so one flag must own both.
inline constexpr size_t kFlagBytes = 128;
inline constexpr int kMaxSlots = 8;
// Short slots of a ring: as many as marks fit in the lines of a flag. They are not a power of two
// apart, so they are in different sets of a cache.
inline constexpr uint64_t kNumShortSlots = (kFlagBytes - sizeof(uint64_t)) / sizeof(uint32_t);
inline constexpr size_t kShortSlotBytes = 512 + kFlagBytes;
// Sizes of messages whose lines their only reader claims (SlotUse). Larger messages take turns in
// their slots, or are written past the caches, or are claimed, too, if a call asks for it. Claims
// of smaller ones would delay the reader's own next message.
inline constexpr size_t kMinClaimedMessage = 512;
inline constexpr size_t kMaxClaimedMessage = 8192;

inline uint64_t load_acquire(const uint64_t& word) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}
inline uint64_t load_relaxed(const uint64_t& word) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_relaxed);
}
inline void store_release(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);
}
inline void store_relaxed(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).store(value, std::memory_order_relaxed);
}
/// Separates this rank's record of a call from its reads of other ranks' records
/// (Waiter::peers_agree): of two ranks that do both, at least one sees the other's record. Pairs
/// with the same call on the other rank.
inline void fence_before_look() {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"  // all it orders is atomic, so no report depends on it
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
}
/// Separates reads of other ranks' buffers from the following load of the failure word
/// (Waiter::is_whole): a rank that has broken the communicator may change what is read behind it.
inline void fence_behind_reads() {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"  // the failure word, which it orders, is atomic
#endif
  std::atomic_thread_fence(std::memory_order_acquire);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
}
/// Stores `value`; later operations begin only after the store is visible to all ranks. For two
/// ranks that each store one word and then load the other's: at least one sees the other's store.
inline void store_then_fence(uint64_t& word, uint64_t value) {
  std::atomic_ref<uint64_t>(word).exchange(value, std::memory_order_seq_cst);
}
/// Stores `value`. Later loads may be earlier than the store, until another thread of the process
/// calls fence_other_threads().
inline void store_unfenced(uint64_t& word, uint64_t value) {
  store_relaxed(word, value);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}
/// Sets `word` to `value` if it is 0; true on success. Otherwise acquires the winner's release.
inline bool claim(uint64_t& word, uint64_t value) {
  uint64_t expected = 0;
  return std::atomic_ref<uint64_t>(word).compare_exchange_strong(expected, value,
                                                                 std::memory_order_acq_rel);
}

/// One flag on its own cache lines. The first 14 marks are on the first of them: a reader that
/// polls `value` gets the mark of a message (a digest of the writer's call) with the same
/// cache-line transfer.
struct alignas(kFlagBytes) FlagLine {
  uint64_t value = 0;
  uint32_t marks[kNumShortSlots] = {};
};
static_assert(sizeof(FlagLine) == kFlagBytes);

inline void set_mark(FlagLine& line, uint64_t index, uint32_t mark) {
  std::atomic_ref<uint32_t>(line.marks[index]).store(mark, std::memory_order_relaxed);
}

/// Where messages are.
enum class Places : uint8_t {
  kStart,   // at the start of their slots
  kTurns,   // small ones begin further on in each round of the ring
  kShort,   // in the ring's short slots; only where ranks share cores (RingMemory::num_marks)
  kTraded,  // where this rank has read the peer's messages (transport/ring/traded_places.h)
};

/// How a call uses the slots of its rings: equal on all ranks.
struct SlotUse {
  // The first so many, a power of two; not of the short slots, of which all are used.
  uint64_t num_slots = kMaxSlots;
  Places places = Places::kStart;
  // Readers claim the lines of messages of at most so many bytes (transport/ring/claim_lines.h).
  size_t most_claimed = 0;
};

/// The addresses of a ring in shared memory.
struct RingMemory {
  std::byte* slots = nullptr;
  size_t slot_bytes = 0;    // of a message, at most
  size_t stride_bytes = 0;  // from slot to slot
  size_t turn_bytes = 0;    // of a slot, in which small messages take turns; a power of two, or 0
  int num_slots = 0;
  std::byte* short_slots = nullptr;  // kNumShortSlots of kShortSlotBytes; null for `ll`
  uint64_t num_marks = kMaxSlots;    // at least as many as unread messages
  FlagLine* tail = nullptr;          // one
  FlagLine* heads = nullptr;         // one per reader
  int num_heads = 1;
  // By slot: where its message is, if not there. Null: all are in their slots.
  const std::byte* const* elsewhere = nullptr;

  /// The slot of the message after `count` others, in a call that uses so many slots.
  std::byte* slot(uint64_t count, uint64_t num_used) const {
    return slots + count % num_used * stride_bytes;
  }
  std::byte* slot(uint64_t count) const { return slot(count, static_cast<uint64_t>(num_slots)); }
  std::byte* short_slot(uint64_t count) const {
    return short_slots + count % kNumShortSlots * kShortSlotBytes;
  }
  /// Where in its slot a message of `nbytes` begins: further on in each round of the ring, since a
  /// line is written faster when it has left its reader's cache (decision 0108). Few lines take as
  /// long in either place.
  std::byte* place(uint64_t count, size_t nbytes) const {
    const uint64_t round = count / static_cast<uint64_t>(num_slots);
    const size_t at = takes_turns(nbytes) ? round * std::bit_ceil(nbytes) & (turn_bytes - 1) : 0;
    return slot(count) + at;
  }
  /// Bytes of messages that take turns before a line is written again.
  size_t round_bytes() const { return static_cast<size_t>(num_slots) * turn_bytes; }
  bool takes_turns(size_t nbytes) const {
    return nbytes > kMaxClaimedMessage && nbytes <= turn_bytes / 2;
  }
  /// Has the system allocate all pages in which messages take turns, and map them for this rank:
  /// page by page, each of the first thousand messages would wait for one at both ends.
  void map_turns() const;
};

/// The writer's end. Private to the writing rank.
class SendEnd {
 public:
  SendEnd() = default;
  explicit SendEnd(const RingMemory& memory)
      : memory_(memory), stores_(PeerStores::default_way(), memory.round_bytes()) {}

  /// Checks for so many credits in a call that uses the slots so. Pairs with RecvEnd::release, so
  /// that the readers' loads are over.
  bool has_free_slots(const SlotUse& use, uint64_t count) {
    places_ = use.places;
    if (use.num_slots != num_used_ && places_ != Places::kShort) change_use(use);
    if (is_free(released_, count)) return true;
    uint64_t slowest = posted_;
    for (int i = 0; i < memory_.num_heads; ++i) {
      const uint64_t head = load_acquire(memory_.heads[i].value);
      if (head < slowest) slowest = head;
    }
    released_ = slowest;
    return is_free(released_, count);
  }
  bool has_free_slot(const SlotUse& use) { return has_free_slots(use, 1); }
  /// As has_free_slot(), which comes first, for one reader, regardless of the others.
  bool has_free_slot_of(int reader) const {
    return is_free(load_acquire(memory_.heads[reader].value));
  }
  std::byte* slot() const {
    return places_ == Places::kShort ? memory_.short_slot(posted_)
                                     : memory_.slot(posted_, num_used_);
  }
  /// Where a message of `nbytes` begins; after has_free_slot().
  std::byte* place(size_t nbytes) {
    if (places_ != Places::kTurns) return slot();
    if (!has_turns_ && memory_.takes_turns(nbytes)) [[unlikely]] {
      memory_.map_turns();
      has_turns_ = true;
    }
    return memory_.place(posted_, nbytes);
  }
  /// How the slots are written.
  PeerStores& stores() { return stores_; }
  /// Sequence number of the message being written: 1, 2, ...
  uint64_t sequence() const { return posted_ + 1; }
  /// Makes the slot's bytes and its mark visible: pairs with RecvEnd::has_full_slot.
  void post(uint32_t mark) {
    set_mark(*memory_.tail, posted_ % memory_.num_marks, mark);
    store_release(memory_.tail->value, ++posted_);
  }
  /// As post(), for bytes that carry their own flags (ll): there is nothing to make visible.
  void post_in_band() { ++posted_; }
  /// Prefetches the first lines of the next message of this size for writing, since their last
  /// reader still shares them, while this rank waits for something else. Affects time only.
  void warm_next(int64_t nbytes) const {
    if (stores_.past_caches() || places_ == Places::kTraded) return;
    const int64_t wanted = nbytes < kMaxWarmBytes ? nbytes : kMaxWarmBytes;
    const std::byte* const next =
        places_ == Places::kTurns ? memory_.place(posted_, static_cast<size_t>(nbytes)) : slot();
    for (int64_t at = 0; at < wanted; at += 64) prefetch_for_write(next + at);
  }

 private:
  static constexpr int64_t kMaxWarmBytes = 16384;

  /// Where a call uses more slots than the last one that used them, messages of the latter may be
  /// in any of them: all have to be released first. Where it uses fewer, an unreleased message k is
  /// in a slot of another number modulo `num_used_` than the next one.
  void change_use(const SlotUse& use) {
    if (use.num_slots > num_used_) drained_ = posted_;
    num_used_ = use.num_slots;
  }
  bool is_free(uint64_t released, uint64_t count = 1) const {
    const uint64_t most = places_ == Places::kShort ? kNumShortSlots : num_used_;
    return posted_ - released + count <= most && released >= drained_;
  }

  RingMemory memory_;
  uint64_t posted_ = 0;
  uint64_t released_ = 0;  // slowest head at the last check
  uint64_t num_used_ = kMaxSlots;
  uint64_t drained_ = 0;    // messages that are released before the next one is written
  bool has_turns_ = false;  // their pages are mapped
  Places places_ = Places::kStart;
  PeerStores stores_;
};

/// A reader's end. Private to the reading rank.
class RecvEnd {
 public:
  RecvEnd() = default;
  RecvEnd(const RingMemory& memory, int reader) : memory_(memory), reader_(reader) {}

  /// Whether a message has arrived. Pairs with SendEnd::post.
  bool has_full_slot() {
    if (seen_ > released_) return true;
    seen_ = load_acquire(memory_.tail->value);
    return seen_ > released_;
  }
  const std::byte* slot() const { return memory_.slot(released_); }
  /// As SendEnd::place().
  const std::byte* place(size_t nbytes, const SlotUse& use) {
    if (memory_.elsewhere != nullptr && memory_.elsewhere[index()] != nullptr) [[unlikely]]
      return memory_.elsewhere[index()];
    if (use.places == Places::kShort) return memory_.short_slot(released_);
    if (use.places != Places::kTurns) return memory_.slot(released_, use.num_slots);
    if (!has_turns_ && memory_.takes_turns(nbytes)) [[unlikely]] {
      memory_.map_turns();
      has_turns_ = true;
    }
    return memory_.place(released_, nbytes);
  }
  uint64_t sequence() const { return released_ + 1; }
  uint32_t mark() const {
    return std::atomic_ref<uint32_t>(memory_.tail->marks[released_ % memory_.num_marks])
        .load(std::memory_order_relaxed);
  }
  /// Returns the slot to the writer: pairs with SendEnd::has_free_slot.
  void release() { store_release(memory_.heads[reader_].value, ++released_); }

 private:
  size_t index() const { return released_ % static_cast<uint64_t>(memory_.num_slots); }

  RingMemory memory_;
  int reader_ = 0;
  uint64_t released_ = 0;
  uint64_t seen_ = 0;       // tail at the last check
  bool has_turns_ = false;  // their pages are mapped
};

}  // namespace pycoll
