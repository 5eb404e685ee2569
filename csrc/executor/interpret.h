// The interpreter. It walks a rank's program tile by tile. The Target defines how a team of threads
// works together; the Protocol defines how bytes and flags travel.
//
// A Target is CpuTarget (cpu/cpu_target.h) or Block (device/block.h), a team of a device's threads.
// It provides:
//   links(), element_size(), sync(), agree(bool), spin_until(ready, site), for_own_peers(),
//   digest(), and the arithmetic that its protocols call. A target that runs a phase at once also
//   has share_steps() and phase(); for the others, each step is a phase.
// A Protocol is Simple, LowLatency or another protocol of protocol.h, Direct (cpu/cpu_direct.h) or
// BlockDirect (device/block_direct.h). It provides bool run(target, program, phase), which
// returns false when a wait failed. That ends the program, and the caller raises the waiter's
// error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/macros.h"
#include "schedule/cut.h"
#include "schedule/step.h"

namespace pycoll {

/// The blocks of one call. Each has `count` elements, unless `block_counts` gives each its own.
struct Payload {
  std::byte* buffers[kNumBuffers] = {};  // by BufferKind; the input is never written
  int64_t count = 0;                     // elements of a block; of the largest one
  int64_t tile_count = 0;                // elements of a block in one tile
  // This team moves tiles first_tile, first_tile + tile_stride, ...; other teams move the rest.
  int64_t first_tile = 0;
  int64_t tile_stride = 1;
  int32_t granule = 1;  // elements; each tile starts at a multiple of it
  // If blocks differ in size: the elements of each block, by its number in the world, and the
  // element at which each block of the input and the output starts, by its index there. Else null.
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

/// One step of one tile, clipped to the elements of the tile. Both ends of every link skip a step
/// without elements.
struct StepOperands {
  const Step* step = nullptr;
  int index = 0;                         // of the step in its program
  const std::byte* local_src = nullptr;  // null: the step reads no local chunks
  std::byte* local_dst = nullptr;        // null: the step writes no local chunks
  int64_t offset = 0;                    // elements from the start of the range's first block
  int64_t count = 0;                     // elements
};

/// A step as a phase of its own. Other phases have the same members, but several steps.
struct OneStep {
  const StepOperands& operands;
  static constexpr int size() { return 1; }
  PYCOLL_HD const StepOperands& operator[](int) const { return operands; }
};

/// Elements [first, first + count) of a block, covered by a range of its pieces. `tile` is the
/// number of the block's elements in the tile.
struct PieceRange {
  int64_t first;
  int64_t count;
};
PYCOLL_HD inline PieceRange piece_range(int64_t tile, int32_t granule, int32_t num_pieces,
                                        int32_t first_piece, int32_t num) {
  const auto start = [&](int32_t piece) -> int64_t {
    if (granule == 1) return chunk_start(tile, num_pieces, piece);
    // A range may end in a later block (Plan::spans_blocks).
    const int32_t num_whole = piece / num_pieces;
    const int64_t granules = (tile + granule - 1) / granule;
    const int64_t at = chunk_start(granules, num_pieces, piece - num_whole * num_pieces) * granule;
    return num_whole * tile + (at < tile ? at : tile);  // the last granule may be incomplete
  };
  const int64_t first = start(first_piece);
  return {first, start(first_piece + num) - first};
}

/// Calls visit(done) for each of the team's tiles until it returns false. A tile starts `done`
/// elements into its blocks.
template <class Visit>
PYCOLL_HD [[gnu::always_inline]] inline bool for_tiles(const Payload& payload, Visit&& visit) {
  for (int64_t done = payload.first_tile * payload.tile_count; done < payload.count;
       done += payload.tile_stride * payload.tile_count) {
    if (!visit(done)) return false;
  }
  return true;
}

/// Operands of a step in the tile that starts at `done`; without elements if there is nothing to
/// do.
PYCOLL_HD [[gnu::always_inline]] inline StepOperands step_operands(
    const ProgramView& program, const Payload& payload, const Step& step, const StepPlace& place,
    int index, int64_t done, int64_t element_size) {
  StepOperands operands;
  operands.step = &step;
  operands.index = index;
  const int64_t left = payload.count_of(place.block) - done;
  if (left <= 0) return operands;
  const int64_t tile = left < payload.tile_count ? left : payload.tile_count;
  const PieceRange range =
      piece_range(tile, payload.granule, program.num_pieces, place.first_piece, step.num_chunks);
  operands.offset = done + range.first;
  operands.count = range.count;
  const auto address = [&](BufferKind buffer, int32_t block) {
    return payload.buffers[static_cast<int>(buffer)] +
           (payload.start_of(buffer, block) + operands.offset) * element_size;
  };
  if (step.has(kReadLocal)) operands.local_src = address(place.src, place.src_index);
  if (step.has(kWriteLocal)) operands.local_dst = address(place.dst, place.dst_index);
  if (step.src_peers == 0 && operands.local_src == operands.local_dst) {
    operands.local_dst = nullptr;  // the bytes are there already
    if (step.dst_peers == 0) operands.count = 0;
  }
  return operands;
}

/// Runs one step of the tile that starts at `done`.
template <class Protocol, class Target>
PYCOLL_HD [[gnu::always_inline]] inline bool run_step(Target& target, const ProgramView& program,
                                                      const Payload& payload, const Step& step,
                                                      const StepPlace& place, int index,
                                                      int64_t done) {
  const StepOperands operands = step_operands(program, payload, step, place, index, done,
                                              static_cast<int64_t>(target.element_size()));
  return operands.count == 0 || Protocol::run(target, program, OneStep{operands});
}

/// Runs one tile, phase by phase.
template <class Protocol, class Target>
PYCOLL_HD [[gnu::always_inline]] inline bool run_phases(Target& target, const ProgramView& program,
                                                        const Payload& payload, int64_t done) {
  for (int32_t first = 0; first < program.num_steps;) {
    const int32_t end = target.share_steps(program, payload, first, done);
    while (first < end) {
      const int32_t next = phase_end(program.steps, first, end);
      if (!Protocol::run(target, program, target.phase(first, next))) return false;
      first = next;
    }
  }
  return true;
}

template <class Protocol, class Target>
PYCOLL_HD bool interpret(Target& target, const ProgramView& program, const Payload& payload) {
  return for_tiles(payload, [&](int64_t done) {
    if constexpr (Target::kRunsPhases) {
      return run_phases<Protocol>(target, program, payload, done);
    } else {
      for (int i = 0; i < program.num_steps; ++i) {
        if (!run_step<Protocol>(target, program, payload, program.steps[i], program.places[i], i,
                                done)) {
          return false;
        }
      }
      return true;
    }
  });
}

}  // namespace pycoll
