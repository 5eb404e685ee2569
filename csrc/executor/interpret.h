// The one interpreter. It walks a rank's program tile by tile; how a team of threads works together
// is the Target, how bytes and flags travel is the Protocol.
//
// A Target is CpuTarget (host.h) or Block (block.h), a team of a device's threads. It gives:
//   links(), element_size(), sync(), agree(bool), spin_until(ready, site), for_own_peers(),
//   digest(), and the arithmetic that its protocols call.
// A Protocol is Simple, LowLatency and its like (protocol.h), Direct (direct.h) or BlockDirect
// (block_direct.h): bool run(target, program, operands), false when a wait failed, which ends the
// program; the caller then raises what the waiter knows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/macros.h"
#include "schedule/cut.h"
#include "schedule/step.h"

namespace pycoll {

/// The blocks of one call. All have `count` elements, or each its own number.
struct Message {
  std::byte* buffers[kNumBuffers] = {};  // by BufferKind; the input is never written
  int64_t count = 0;                     // elements of a block; of the largest one
  int64_t tile_count = 0;                // elements of a block in one tile
  // This team moves tiles first_tile, first_tile + tile_stride, ...; other teams move the others.
  int64_t first_tile = 0;
  int64_t tile_stride = 1;
  int32_t granule = 1;  // elements: tiles are cut at multiples of it
  // Where blocks differ: elements of each block, by its number in the world, and the element at
  // which each block of the input and the output starts, by its index there. Else null.
  const int64_t* block_counts = nullptr;
  const int64_t* starts[kNumBuffers] = {};

  PYCOLL_HD int64_t count_of(int32_t block) const {
    return block_counts == nullptr ? count : block_counts[block];
  }
  PYCOLL_HD int64_t start_of(BufferKind buffer, int32_t index) const {
    const int64_t* table = starts[static_cast<int>(buffer)];
    return table == nullptr ? index * count : table[index];
  }
};

/// One step of one tile, with the tile's clipping done.
struct StepOperands {
  const Step* step = nullptr;
  int index = 0;                         // of the step in its program
  const std::byte* local_src = nullptr;  // null: the local chunks are no source
  std::byte* local_dst = nullptr;        // null: the local chunks are no destination
  int64_t offset = 0;                    // elements from the start of the range's first block
  int64_t count = 0;                     // elements
};

/// Elements [first, first + count) of a block that pieces of it are, in a tile of so many elements.
struct PieceRange {
  int64_t first;
  int64_t count;
};
PYCOLL_HD inline PieceRange piece_range(int64_t tile, int32_t granule, int32_t num_pieces,
                                        int32_t first_piece, int32_t num) {
  const auto start = [&](int32_t piece) -> int64_t {
    if (granule == 1) return chunk_start(tile, num_pieces, piece);
    // A range may end blocks further on (Plan::spans_blocks).
    const int32_t num_whole = piece / num_pieces;
    const int64_t granules = (tile + granule - 1) / granule;
    const int64_t at = chunk_start(granules, num_pieces, piece - num_whole * num_pieces) * granule;
    return num_whole * tile + (at < tile ? at : tile);  // the last granule may be a part of one
  };
  const int64_t first = start(first_piece);
  return {first, start(first_piece + num) - first};
}

/// Calls visit(done) for each of the team's tiles, which starts `done` elements into its blocks,
/// until it says false.
template <class Visit>
PYCOLL_HD [[gnu::always_inline]] inline bool for_tiles(const Message& message, Visit&& visit) {
  for (int64_t done = message.first_tile * message.tile_count; done < message.count;
       done += message.tile_stride * message.tile_count) {
    if (!visit(done)) return false;
  }
  return true;
}

/// One step of the tile that starts at `done`.
template <class Protocol, class Target>
PYCOLL_HD [[gnu::always_inline]] inline bool run_step(Target& target, const ProgramView& program,
                                                      const Message& message, const Step& step,
                                                      const StepPlace& place, int index,
                                                      int64_t done) {
  const auto element_size = static_cast<int64_t>(target.element_size());
  const int64_t left = message.count_of(place.block) - done;
  if (left <= 0) return true;
  const int64_t tile = left < message.tile_count ? left : message.tile_count;
  const PieceRange range =
      piece_range(tile, message.granule, program.num_pieces, place.first_piece, step.num_chunks);
  if (range.count == 0) return true;  // both ends of every link skip it alike
  StepOperands operands;
  operands.step = &step;
  operands.index = index;
  operands.offset = done + range.first;
  operands.count = range.count;
  const auto address = [&](BufferKind buffer, int32_t block) {
    return message.buffers[static_cast<int>(buffer)] +
           (message.start_of(buffer, block) + operands.offset) * element_size;
  };
  if (step.has(kReadLocal)) operands.local_src = address(place.src, place.src_index);
  if (step.has(kWriteLocal)) operands.local_dst = address(place.dst, place.dst_index);
  if (step.src_peers == 0 && operands.local_src == operands.local_dst) {
    operands.local_dst = nullptr;  // it is there already
    if (step.dst_peers == 0) return true;
  }
  return Protocol::run(target, program, operands);
}

template <class Protocol, class Target>
PYCOLL_HD bool interpret(Target& target, const ProgramView& program, const Message& message) {
  return for_tiles(message, [&](int64_t done) {
    for (int i = 0; i < program.num_steps; ++i) {
      if (!run_step<Protocol>(target, program, message, program.steps[i], program.places[i], i,
                              done)) {
        return false;
      }
    }
    return true;
  });
}

}  // namespace pycoll
