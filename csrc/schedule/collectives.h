// THE table of collectives, one row each: the state from which a collective starts, the state that
// it must reach, where its blocks lie in the callers' memory, and the factor that converts its
// algbw to busbw.
//
// A collective moves blocks. A schedule cuts every block into the same number of pieces; its chunks
// are all pieces of block 0, then all of block 1, and so on. A block has the same number on all
// ranks; input_block and output_block give its place in a rank's buffers.
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
  kPerRank,     // n blocks: block b belongs to rank b
  kPerPair,     // n * n blocks: block s * n + d goes from rank s to rank d
  kTwoPerRank,  // 2n blocks: 2s goes from rank s to rank s - 1, 2s + 1 to rank s + 1 (mod n)
};
int num_blocks(Blocks blocks, int num_ranks);

/// A block as seen by a rank: the rank, the block's number, the number of ranks, and the root.
struct BlockAt {
  int rank;
  int block;
  int num_ranks;
  int root;
};

/// The value that a block must have at the end.
struct Goal {
  enum class Kind : uint8_t {
    kAny,           // not used by the caller
    kStart,         // the start value of rank `source`
    kReduced,       // the reduction of every rank's start value, in one order on all ranks
    kPrefix,        // the reduction of the start values of ranks 0..rank
    kPrefixBefore,  // the reduction of the start values of ranks 0..rank-1
  };
  Kind kind = Kind::kAny;
  int source = 0;  // kStart
};

/// Index of a block that is not in that buffer.
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
  // The size of a message in blocks, defined like nccl-tests' "size": the larger one of a rank's
  // input and output.
  int (*blocks_per_payload)(int num_ranks);
  double (*busbw_factor)(int num_ranks);  // from nccl-tests' PERFORMANCE.md
};

std::span<const CollectiveInfo> collectives();
const CollectiveInfo& info(Collective collective);
/// Raises UsageError listing the known names.
Collective collective_from_name(std::string_view name);

}  // namespace pycoll
