// A move: one transfer of a collective, with both of its ends. Algorithms write a send and its
// receive as one move, so two ranks cannot disagree about a transfer.
//
// All moves of one round are simultaneous: every source has its value from the start of the round.
#pragma once

#include <cstdint>

namespace pycoll {

enum class MoveKind : uint8_t {
  kCopy,    // dst's chunks become src's chunks
  kReduce,  // dst's chunks become reduce(dst's chunks, src's chunks)
};

/// Chunks [first, first + count) of the collective's buffer. A chunk has the same index, and the
/// same bytes, at both ends of a move.
struct ChunkRange {
  int32_t first = 0;
  int32_t count = 1;

  friend bool operator==(const ChunkRange&, const ChunkRange&) = default;
  int32_t end() const { return first + count; }
  bool overlaps(const ChunkRange& other) const {
    return first < other.end() && other.first < end();
  }
};

struct Move {
  int32_t round = 0;
  MoveKind kind = MoveKind::kCopy;
  ChunkRange chunks;
  int32_t src = 0;  // rank whose chunks are read
  int32_t dst = 0;  // rank whose chunks are written

  friend bool operator==(const Move&, const Move&) = default;
};

}  // namespace pycoll
