// Placing: which of the caller's buffers holds the local chunks of each step.
//
// A rank's blocks start in its input, which is never written, and end in its output. What it holds
// for others on the way, and what has no place in its output, lies in scratch memory of the
// library. A chunk is read where it was last written.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

/// One block that is copied whole, outside the program.
struct BlockCopy {
  int32_t block = 0;  // its number in the world
  BufferKind from = BufferKind::kInput;
  BufferKind to = BufferKind::kOutput;
  int32_t from_index = 0;
  int32_t to_index = 0;
};

struct Placement {
  int32_t num_pieces = 1;         // chunks of a block
  std::vector<StepPlace> steps;   // of the program's steps
  std::vector<BlockCopy> before;  // the program starts from these copies
  std::vector<BlockCopy> after;   // and these finish its result
  std::vector<int32_t> scratch;   // world numbers of the blocks in scratch, in their order
  bool spans_blocks = false;      // a range crosses a block's border
};

/// Places the local chunks of every step. Where the rank's own start value must reach its output
/// and a step sends it, that step is made to store it, too.
/// `written_by_peers` (empty, or one per chunk) are chunks that others put into the output.
/// Nothing when a range of several blocks has no contiguous place: lower without joined blocks.
std::optional<Placement> place_chunks(const Schedule& schedule, Program& program,
                                      const std::vector<bool>& written_by_peers = {});

}  // namespace pycoll
