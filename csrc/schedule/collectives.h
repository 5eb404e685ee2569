// THE table of collectives: one row each, with the state a collective starts from, the state that
// it must reach, where its blocks lie in the callers' memory, and the factor that turns its algbw
// into busbw.
//
// A collective moves blocks. A schedule cuts every block into the same number of pieces; its chunks
// are all pieces of block 0, then all of block 1, and so on. A block has one number in the whole
// world, whoever holds it; input_block and output_block say where a rank's buffers have it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace pycoll {

enum class Collective : uint8_t {
  kAllReduce,
  kBroadcast,
  kBarrier,
  kReduceScatter,
  kAllGather,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kScan,
  kExscan,
  kNeighborExchange,
};
inline constexpr int kNumCollectives = 12;

enum class Blocks : uint8_t {
  kOne,         // the message is one block
  kPerRank,     // n blocks: block b is rank b's
  kPerPair,     // n * n blocks: block s * n + d goes from rank s to rank d
  kTwoPerRank,  // 2n blocks: 2s goes from rank s to rank s - 1, 2s + 1 to rank s + 1 (mod n)
};
int num_blocks(Blocks blocks, int num_ranks);

/// Where a block stands in the world: at which rank, which block, of how many ranks, which root.
struct BlockAt {
  int rank;
  int block;
  int num_ranks;
  int root;
};

/// What a block must hold at the end.
struct Goal {
  enum class Kind : uint8_t {
    kAny,           // nobody will look
    kStart,         // the start value of rank `source`
    kReduced,       // the reduction of every rank's start value, in one order on all ranks
    kPrefix,        // the reduction of the start values of ranks 0..rank
    kPrefixBefore,  // the reduction of the start values of ranks 0..rank-1
  };
  Kind kind = Kind::kAny;
  int source = 0;  // kStart
};

/// No such block in that buffer.
inline constexpr int kNoBlock = -1;

struct CollectiveInfo {
  Collective id;
  std::string_view name;
  bool has_op;    // takes a reduction operator
  bool has_root;  // takes a root
  Blocks blocks;
  bool (*starts_with_value)(const BlockAt& at);  // else the block is undefined at the start
  Goal (*goal)(const BlockAt& at);
  // Index of the block in the rank's input and output buffer, in blocks; kNoBlock: it is not there.
  // Every block that starts with a value is in the input; every block with a goal is in the output.
  int (*input_block)(const BlockAt& at);
  int (*output_block)(const BlockAt& at);
  // The size of a message counts so many blocks, as nccl-tests' "size" does: the larger one of
  // what a rank brings and what it gets.
  int (*blocks_per_message)(int num_ranks);
  double (*busbw_factor)(int num_ranks);  // as in nccl-tests' PERFORMANCE.md
};

std::span<const CollectiveInfo> collectives();
const CollectiveInfo& info(Collective collective);
/// Raises UsageError listing the known names.
Collective collective_from_name(std::string_view name);

}  // namespace pycoll
