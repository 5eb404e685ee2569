// What a rank does with the lines of a peer's array that it has only read.
//
// They stay in the reader's cache, and the owner has them, too. Its next write of each has to wait
// until the reader has dropped it: five times as long as a write of a line that the reader has
// changed, which is the reader's alone. So a reader may
//   - claim lines (transport/ring/claim_lines.h, decision 0113). This needs an array that the
//     reader may write, and that no other rank reads;
//   - return lines: it flushes them to memory (decision 0106). That pays only where the two cores
//     share no cache. So each owner measures it: now and then it writes a few lines that a peer has
//     read and kept, and as many that the peer has returned, and asks its peers, in the exchange,
//     for what is faster.
// Neither pays for lines that the owner has not written since the last call. A reader sees that by
// the time in which a line comes. It keeps one of each block that it returns: in the middle, where
// it is not prefetched with the block before.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/ring/segment.h"

namespace pycoll {

class PeerLoads {
 public:
  enum class Way : uint8_t { kMeasured, kKept, kReturned, kClaimed };

  /// What the calls of one plan have found: whether owners write their arrays between calls.
  class Claims {
   public:
    /// A call looks once in a period: a prime number, since a program may use arrays in turn.
    void begin_call() {
      const uint32_t turn = num_calls_++ % kPeriod;
      looks_ = turn == kLookTurn;
      leaves_end_ = turn == kLookTurn - 1;
    }
    bool looks() const { return looks_; }
    /// Whether the last blocks are not claimed, for the look of the next call: a claimed line that
    /// its owner has only read would look as if it were new.
    bool leaves_end() { return std::exchange(leaves_end_, false); }
    bool is_rewritten() const { return is_rewritten_; }
    /// What a look has found. Near, a load of a new line takes hardly longer than that of an old
    /// one. So a look that contradicts those before it counts if another, two calls later, agrees.
    void found(bool is_rewritten) {
      looks_ = false;
      is_doubted_ = is_rewritten != is_rewritten_ && !is_doubted_;
      if (is_doubted_) {
        num_calls_ = kLookTurn - 1;
      } else {
        is_rewritten_ = is_rewritten;
      }
    }

   private:
    static constexpr uint32_t kPeriod = 31;
    static constexpr uint32_t kLookTurn = 5;
    uint32_t num_calls_ = 0;
    bool looks_ = false;
    bool leaves_end_ = false;
    bool is_rewritten_ = false;
    bool is_doubted_ = false;
  };

  PeerLoads(Segment& segment, int rank, int num_ranks, Way way = default_way());

  /// Call it before this rank enters an exchange. Returns whether its peers are to return lines.
  bool enter();
  /// Call it when all ranks have entered an operation on mapped arrays of `nbytes`, which is equal
  /// on all ranks. In a trial it reads the lines of a rank that measures.
  void entered(int64_t nbytes);

  /// Whether the owner has written the middle of a block after this rank's last access. Loads it.
  bool is_new(int owner, const std::byte* src, size_t nbytes) const;
  /// Returns the lines of a block, except those in the middle.
  static void give_back(const std::byte* src, size_t nbytes);

  /// Whether lines are claimed that may be.
  bool claims() const { return claims_; }
  /// Whether the owner writes its array between calls; `src` is a part of it. Loads a line near the
  /// end, which this rank has read last: if it is old, it is still in this rank's cache. Not of the
  /// last page, which may be an edge, whose copy is not written if it is equal.
  bool is_rewritten(int owner, const std::byte* src, size_t nbytes) const {
    const size_t looked_at = std::min(nbytes, kLookedAtBytes);
    return is_new(owner, src + (nbytes - looked_at), looked_at / 2);
  }

  /// Notes what an owner's writes of lines took: those that `peer` has kept, and returned.
  void took(int peer, uint64_t kept, uint64_t returned);
  bool wants_lines() const { return wants_lines_; }

  static constexpr size_t kMinBytes = 4096;  // of a block whose lines are returned
  // Most lines of a larger part have left the reader's caches by themselves.
  static constexpr size_t kMaxBytes = 16 << 20;
  static constexpr size_t kBlockBytes = 128 << 10;  // a block is still in L2 when it is returned
  static constexpr size_t kClaimedBytes = 4096;     // claims of a block run beside the next loads
  static constexpr size_t kLookedAtBytes = 2 * kClaimedBytes;  // at the end of a part

 private:
  // Cores may become far, or near, within a second, so fewer operations are between two trials if
  // they are large: 15 of 16 MiB. A trial after one costs 45 us, since the lines have left L2.
  static constexpr int64_t kBetweenTrials = 256;   // operations
  static constexpr int64_t kBytesOfOne = 1 << 20;  // count as one more operation
  static constexpr int64_t kBeforeFirst = 8;       // the first touches of the lines are not timed
  // The reader's own time is not measured here. Where cores share a cache, lines that were kept are
  // written faster than returned ones; where they do not, 1.8 to 3 times as slowly. A single
  // measurement may take twice as long as another, so what was found last has the doubt.
  static constexpr float kMarginToKeep = 1.15F;
  static constexpr float kMarginToReturn = 1.4F;

  /// The median of the last measurements: the kernel interrupts some, and a line may have been
  /// prefetched. 0 before the first one.
  class Median {
   public:
    void add(uint64_t took) {
      if (median_ == 0) last_.fill(took);
      last_[num_++ % last_.size()] = took;
      std::array<uint64_t, kNumLast> sorted = last_;
      std::nth_element(sorted.begin(), sorted.begin() + kNumLast / 2, sorted.end());
      median_ = sorted[kNumLast / 2];
    }
    uint64_t get() const { return median_; }

   private:
    static constexpr int kNumLast = 7;
    std::array<uint64_t, kNumLast> last_ = {};
    size_t num_ = 0;
    uint64_t median_ = 0;
  };
  struct Peer {
    Median kept;  // ticks of this rank's writes
    Median returned;
    Median changed;    // ticks of this rank's loads of lines that the peer has just written
    Median unchanged;  // and of some that it has not
  };

  static Way default_way();
  /// The rank that reads the lines of `owner` in this turn.
  int reader_of(int owner) const;
  void write_lines(CacheLine* lines) const;

  Segment& segment_;
  const int rank_;
  const int num_ranks_;
  const bool measures_;
  const bool claims_;
  bool wants_lines_;
  bool is_armed_ = false;  // a peer has read this rank's lines, and the next write is timed
  // Equal on all ranks:
  bool is_trial_ = false;  // in the next operation on mapped arrays
  int64_t until_trial_ = kBeforeFirst;
  uint32_t num_trials_ = 0;
  std::vector<Peer> peers_;
};

}  // namespace pycoll
