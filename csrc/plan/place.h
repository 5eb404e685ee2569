// Placing: the choice of a buffer for the local chunks of each step.
//
// A rank's blocks start in its input, which is never written, and end in its output. Blocks that it
// holds for other ranks, and blocks without a place in its output, lie in scratch memory of the
// library. A chunk is read where it was last written.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

/// A copy of a whole block, outside the program.
struct BlockCopy {
  int32_t block = 0;  // its number in the world
  BufferKind from = BufferKind::kInput;
  BufferKind to = BufferKind::kOutput;
  int32_t from_index = 0;
  int32_t to_index = 0;
};

struct Placement {
  int32_t num_pieces = 1;           // chunks of a block
  std::vector<StepPlace> steps;     // one per step of the program
  std::vector<BlockCopy> before;    // copies to make before the program
  std::vector<BlockCopy> any_time;  // copies that no step needs or changes, before or meanwhile
  std::vector<BlockCopy> after;     // copies to make after it, which complete the result
  std::vector<int32_t> scratch;     // world numbers of the blocks in scratch, in their order
  bool spans_blocks = false;        // a range crosses a block's border
};

/// Places the local chunks of every step. The steps of a phase read where the chunks lie before it.
/// If the rank's own start value must reach its output and a
/// step sends it, that step stores it, too.
/// `written_by_peers` (empty, or one flag per chunk) marks chunks that peers write to the output.
/// Returns nothing when a range of several blocks has no contiguous place; lower without joined
/// blocks then.
std::optional<Placement> place_chunks(const Schedule& schedule, Program& program,
                                      const std::vector<bool>& written_by_peers = {});

}  // namespace pycoll
