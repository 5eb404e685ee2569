// What a rank does with the lines of a peer's array that it has only read.
//
// They stay in the reader's cache, and the owner's next write of each takes it from there. Where
// the two cores share no cache, this is several times slower than a write to memory, and slower
// than the collective; where they share one, the lines are best left where they are (decision
// 0106). So each owner measures it: now and then it writes a few lines that a peer has read and
// kept, and as many that the peer has returned, that is flushed to memory. It then asks its peers,
// in the exchange, for what is faster. A reader does not return lines that the owner has not
// written since the last call. It sees that by the time in which a line comes, and therefore keeps
// one of each block: in the middle, where it is not prefetched with the block before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "transport/ring/segment.h"

namespace pycoll {

class PeerLoads {
 public:
  enum class Way : uint8_t { kMeasured, kKept, kReturned };

  PeerLoads(Segment& segment, int rank, int num_ranks, Way way = default_way());

  /// Call it before this rank enters an exchange. Returns whether its peers are to return lines.
  bool enter();
  /// Call it when all ranks have entered an operation on mapped arrays. From time to time it reads
  /// the lines of a rank that measures.
  void entered();

  /// Whether the owner has written the middle of a block after this rank's last access. Loads it.
  bool is_new(int owner, const std::byte* src, size_t nbytes) const;
  /// Returns the lines of a block, except those in the middle.
  static void give_back(const std::byte* src, size_t nbytes);

  /// Notes what an owner's writes of lines took: those that `peer` has kept, and returned.
  void took(int peer, uint64_t kept, uint64_t returned);
  bool wants_lines() const { return wants_lines_; }

  static constexpr size_t kMinBytes = 4096;         // of a block whose lines are returned
  static constexpr size_t kBlockBytes = 128 << 10;  // a block is still in L2 when it is returned
  static constexpr uint32_t kPeriod = 256;          // operations

 private:
  // The first measurement comes early, but not in the first touch of the lines.
  static constexpr uint32_t kTurn = 8;
  // The reader's own time is not measured here. Where cores share a cache, lines that were kept are
  // written faster than returned ones; where they do not, two to three times as slowly.
  static constexpr float kMargin = 1.25F;

  /// The median of the last three measurements: the kernel interrupts some, and a line may have
  /// been prefetched. 0 before the first one.
  struct Median {
    uint64_t last[3] = {0, 0, 0};
    void add(uint64_t took) {
      if (last[0] == 0) last[1] = last[2] = took;
      last[2] = std::exchange(last[1], std::exchange(last[0], took));
    }
    uint64_t get() const {
      return std::max(std::min(last[0], last[1]), std::min(std::max(last[0], last[1]), last[2]));
    }
  };
  struct Peer {
    Median kept;  // ticks of this rank's writes
    Median returned;
    Median changed;    // ticks of this rank's load of a line that the peer has just written
    Median unchanged;  // and of one that it has not
  };

  static Way default_way();
  /// The rank that reads the lines of `owner` in this turn.
  int reader_of(int owner) const;
  void write_lines(CacheLine* lines) const;

  Segment& segment_;
  const int rank_;
  const int num_ranks_;
  const bool measures_;
  bool wants_lines_;
  bool is_armed_ = false;  // a peer reads this rank's lines, and the next write is timed
  uint32_t count_ = 0;     // operations on mapped arrays: equal on all ranks
  std::vector<Peer> peers_;
};

}  // namespace pycoll
