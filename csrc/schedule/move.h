// One event of a collective, with both of its ends. Authors never write a send and its receive
// apart, so two ranks cannot disagree about what passes between them.
//
// All moves of one round are simultaneous: every source is read as it was when the round began.
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
  int32_t src = 0;  // rank that is read
  int32_t dst = 0;  // rank that is written

  friend bool operator==(const Move&, const Move&) = default;
};

}  // namespace pycoll
