// A schedule: all moves of the whole world for one collective, as an algorithm wrote them.
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
  // A chunk that all others take from one rank in one round may travel as one slot with many
  // readers. Algorithms that are defined by n-1 separate messages say false.
  bool multicast = true;
  std::vector<Move> moves;  // ascending rounds

  /// Chunks of one block.
  int32_t pieces_per_block() const {
    return num_chunks / num_blocks(info(collective).blocks, num_ranks);
  }
  /// Where the block of `chunk` stands.
  BlockAt block_at(int rank, int chunk) const {
    return {rank, chunk / pieces_per_block(), num_ranks, root};
  }
  /// Whether some rank ends with the reduction of all ranks' values: only then does the operator's
  /// last factor apply.
  bool has_reduced_goal() const {
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (info(collective).goal(block_at(rank, 0)).kind == Goal::Kind::kReduced) return true;
    }
    return false;
  }
};

/// Collects moves and refuses those that no execution could give a meaning to.
class ScheduleBuilder {
 public:
  /// Raises UsageError when num_ranks is below 1, num_chunks is no multiple of the collective's
  /// number of blocks, or root is not a rank.
  ScheduleBuilder(Collective collective, std::string algorithm, int num_ranks, int num_chunks,
                  int root = 0);

  ScheduleBuilder& copy(int round, ChunkRange chunks, int src, int dst);
  ScheduleBuilder& reduce(int round, ChunkRange chunks, int src, int dst);
  ScheduleBuilder& add(const Move& move);
  /// Every fan-out stays n-1 separate messages.
  ScheduleBuilder& without_multicast();

  /// Sorts by round (stable) and checks: ranks and chunks in range, src != dst, and that ranges
  /// which reach one rank in one round are identical (fan-in) or disjoint.
  /// Raises UsageError naming the first bad move.
  Schedule build();

 private:
  Schedule schedule_;
};

/// One line, for messages: `round 3: reduce chunks 2..3 from rank 1 to rank 2`.
std::string to_string(const Move& move);

}  // namespace pycoll
