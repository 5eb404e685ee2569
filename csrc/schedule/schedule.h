// A schedule: all moves of all ranks for one collective, as an algorithm defines them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/collectives.h"
#include "schedule/move.h"

namespace pycoll {

struct Schedule {
  Collective collective = Collective::kAllReduce;
  std::string algorithm;
  int32_t num_ranks = 1;
  int32_t num_chunks = 1;
  int32_t root = 0;
  // A chunk that all other ranks take from one rank in one round may travel as one slot with many
  // readers. Algorithms that are defined by n-1 separate messages set this to false.
  bool multicast = true;
  std::vector<Move> moves;  // ascending rounds

  /// Number of chunks in a block.
  int32_t pieces_per_block() const {
    return num_chunks / num_blocks(info(collective).blocks, num_ranks);
  }
  /// The block of `chunk`, as seen by `rank`.
  BlockAt block_at(int rank, int chunk) const {
    return {rank, chunk / pieces_per_block(), num_ranks, root};
  }
  /// Whether some rank ends with the reduction of all ranks' values. Only then is the operator's
  /// last factor applied.
  bool has_reduced_goal() const {
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (info(collective).goal(block_at(rank, 0)).kind == Goal::Kind::kReduced) return true;
    }
    return false;
  }
};

/// Collects moves and refuses those that have no well-defined result.
class ScheduleBuilder {
 public:
  /// Raises UsageError when num_ranks is below 1, num_chunks is no multiple of the collective's
  /// number of blocks, or root is not a rank.
  ScheduleBuilder(Collective collective, std::string algorithm, int num_ranks, int num_chunks,
                  int root = 0);

  ScheduleBuilder& copy(int round, ChunkRange chunks, int src, int dst);
  ScheduleBuilder& reduce(int round, ChunkRange chunks, int src, int dst);
  ScheduleBuilder& add(const Move& move);
  /// Sends every fan-out as n-1 separate messages.
  ScheduleBuilder& without_multicast();

  /// Sorts by round (stable) and checks that ranks and chunks are in range, that src != dst, and
  /// that ranges that reach one rank in one round are identical (fan-in) or disjoint.
  /// Raises UsageError naming the first bad move.
  Schedule build();

 private:
  Schedule schedule_;
};

/// One line, for error messages: `round 3: reduce chunks 2..3 from rank 1 to rank 2`.
std::string to_string(const Move& move);

}  // namespace pycoll
