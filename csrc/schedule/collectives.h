// THE table of collectives: one row each, with the state a collective starts from, the state that
// it must reach, and the factor that turns its algbw into busbw.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace pycoll {

enum class Collective : uint8_t { kAllReduce, kBroadcast, kBarrier };

/// Where a chunk stands in the world: which rank, which chunk, of how many, with which root.
struct ChunkAt {
  int rank;
  int chunk;
  int num_ranks;
  int num_chunks;
  int root;
};

enum class Goal : uint8_t {
  kAny,      // nobody will look
  kReduced,  // the reduction of every rank's start value, in one order on all ranks
  kRoots,    // the root's start value
};

struct CollectiveInfo {
  Collective id;
  std::string_view name;
  bool has_op;                                   // takes a reduction operator
  bool has_root;                                 // takes a root
  bool (*starts_with_value)(const ChunkAt& at);  // else the chunk is undefined at the start
  Goal (*goal)(const ChunkAt& at);
  double (*busbw_factor)(int num_ranks);  // as in nccl-tests' PERFORMANCE.md
};

std::span<const CollectiveInfo> collectives();
const CollectiveInfo& info(Collective collective);
/// Raises UsageError listing the known names.
Collective collective_from_name(std::string_view name);

}  // namespace pycoll
