// The acquire and release operations between devices, and the two ends of a ring in device memory.
//
// The invariants are those of slot.h, with one reader per ring and a push layout: slots and tail
// are in the reader's memory, the head is in the writer's. All orders have system scope: the other
// end may be on another GPU, or in another process on this one. On host threads the same source
// uses std::atomic_ref, so that ThreadSanitizer checks it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bits.h"
#include "base/macros.h"
#include "transport/ring/slot.h"

#ifdef __CUDACC__
#include <cuda/atomic>
#endif

namespace pycoll::device {

#ifdef __CUDA_ARCH__
template <class T>
using SystemRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
#define PYCOLL_ORDER(name) cuda::memory_order_##name
#else
template <class T>
using SystemRef = std::atomic_ref<T>;
#define PYCOLL_ORDER(name) std::memory_order_##name
#endif

template <class T>
PYCOLL_HD inline T load_acquire(const T& word) {
  return SystemRef<T>(const_cast<T&>(word)).load(PYCOLL_ORDER(acquire));
}
template <class T>
PYCOLL_HD inline T load_relaxed(const T& word) {
  return SystemRef<T>(const_cast<T&>(word)).load(PYCOLL_ORDER(relaxed));
}
template <class T>
PYCOLL_HD inline void store_release(T& word, T value) {
  SystemRef<T>(word).store(value, PYCOLL_ORDER(release));
}
template <class T>
PYCOLL_HD inline void store_relaxed(T& word, T value) {
  SystemRef<T>(word).store(value, PYCOLL_ORDER(relaxed));
}
/// Loads a word whose access a flag orders. On host threads this is not atomic, so that
/// ThreadSanitizer reports a missing flag; on a GPU it bypasses caches that are not coherent.
template <class T>
PYCOLL_HD inline T load_ordered(const T& word) {
#ifdef __CUDA_ARCH__
  return load_relaxed(word);
#else
  return word;
#endif
}
template <class T>
PYCOLL_HD inline void store_ordered(T& word, T value) {
#ifdef __CUDA_ARCH__
  store_relaxed(word, value);
#else
  word = value;
#endif
}
/// Sets `word` from 0 to 1; true only for the caller that does so.
PYCOLL_HD inline bool claim(uint64_t& word) {
  uint64_t expected = 0;
  return SystemRef<uint64_t>(word).compare_exchange_strong(expected, 1, PYCOLL_ORDER(acq_rel),
                                                           PYCOLL_ORDER(acquire));
}
#undef PYCOLL_ORDER

/// 16 bytes that one instruction moves on a GPU. Each half is atomic. No standard guarantees that
/// both halves arrive together; block_long_lines.h states what ll128 relies on.
struct alignas(16) Word16 {
  uint64_t low;
  uint64_t high;
};

PYCOLL_HD inline Word16 load_relaxed16(const void* from) {
  Word16 word;
#ifdef __CUDA_ARCH__
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(word.low), "=l"(word.high)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
#else
  const auto* words = static_cast<const uint64_t*>(from);
  word = {load_relaxed(words[0]), load_relaxed(words[1])};
#endif
  return word;
}
PYCOLL_HD inline void store_relaxed16(void* to, Word16 word) {
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(to)), "l"(word.low), "l"(word.high)
               : "memory");
#else
  auto* words = static_cast<uint64_t*>(to);
  store_relaxed(words[0], word.low);
  store_relaxed(words[1], word.high);
#endif
}

/// A ring as both ends see it. `index` is the slot of the next message.
struct RingCursor {
  std::byte* slots;
  FlagLine* tail;
  uint64_t* head;
  int64_t slot_bytes;
  int32_t num_slots;
  int32_t index;

  PYCOLL_HD std::byte* slot() const { return slots + index * slot_bytes; }
  PYCOLL_HD void advance() { index = index + 1 == num_slots ? 0 : index + 1; }
};

/// The writer's end, in a block's shared memory. One thread changes it, between two barriers.
class BlockSendEnd {
 public:
  /// Continues after `posted` messages. Replaces a constructor, which GPU shared memory cannot run.
  PYCOLL_HD void open(const RingCursor& ring, uint64_t posted, uint64_t credit) {
    ring_ = ring;
    posted_ = posted;
    released_ = credit;
  }
  /// Checks for a credit. Pairs with BlockRecvEnd::release, so that the reader's loads are over.
  PYCOLL_HD bool has_free_slot() {
    if (posted_ - released_ < static_cast<uint64_t>(ring_.num_slots)) return true;
    // Relaxed while it waits: on a GPU each acquire empties the processor's L1 cache.
    if (posted_ - load_relaxed(*ring_.head) >= static_cast<uint64_t>(ring_.num_slots)) return false;
    released_ = load_acquire(*ring_.head);
    return true;
  }
  PYCOLL_HD std::byte* slot() const { return ring_.slot(); }
  PYCOLL_HD uint64_t sequence() const { return posted_ + 1; }
  PYCOLL_HD uint64_t posted() const { return posted_; }
  PYCOLL_HD uint64_t credit() const { return released_; }
  /// Makes the slot's bytes and its mark visible: pairs with BlockRecvEnd::has_full_slot. The
  /// block's other threads have written before the preceding barrier, and a release is cumulative.
  PYCOLL_HD void post(uint32_t mark) {
    store_ordered(ring_.tail->marks[ring_.index], mark);
    store_release(ring_.tail->value, ++posted_);
    ring_.advance();
  }
  PYCOLL_HD void post_in_band() {
    ++posted_;
    ring_.advance();
  }

 private:
  RingCursor ring_;
  uint64_t posted_;
  uint64_t released_;  // the head at the last check
};

/// The reader's end, also in a block's shared memory.
class BlockRecvEnd {
 public:
  PYCOLL_HD void open(const RingCursor& ring, uint64_t released) {
    ring_ = ring;
    released_ = released;
    seen_ = released;
  }
  /// Whether a message has arrived. Pairs with BlockSendEnd::post.
  PYCOLL_HD bool has_full_slot() {
    if (seen_ > released_) return true;
    if (load_relaxed(ring_.tail->value) <= released_) return false;  // as has_free_slot()
    seen_ = load_acquire(ring_.tail->value);
    return true;
  }
  PYCOLL_HD std::byte* slot() const { return ring_.slot(); }
  PYCOLL_HD uint64_t sequence() const { return released_ + 1; }
  PYCOLL_HD uint64_t released() const { return released_; }
  PYCOLL_HD int64_t slot_bytes() const { return ring_.slot_bytes; }
  PYCOLL_HD uint32_t mark() const { return load_ordered(ring_.tail->marks[ring_.index]); }
  /// Number of earlier uses of this slot, in rings whose number of slots is a power of two.
  PYCOLL_HD uint64_t slot_uses() const {
    return released_ >> count_bits(static_cast<uint64_t>(ring_.num_slots - 1));
  }
  /// Returns the slot to the writer: pairs with BlockSendEnd::has_free_slot.
  PYCOLL_HD void release() {
    store_release(*ring_.head, ++released_);
    ring_.advance();
  }
  /// As release(), for slots that need no credit.
  PYCOLL_HD void release_in_band() {
    ++released_;
    ring_.advance();
  }

 private:
  RingCursor ring_;
  uint64_t released_;
  uint64_t seen_;  // the tail at the last check
};

}  // namespace pycoll::device
