// The only instruction, dsts <- reduce(srcs), and a rank's program of such steps.
//
// A step waits until every source link has a full slot and every destination link has a free one,
// combines the sources in rank order (local chunks at this rank's place), writes every destination,
// and posts. A program holds no byte sizes and no pointers.
//
// Consecutive steps that do not depend on each other may form a phase (phases.h), which a team of
// threads runs at once.
#pragma once

#include <cstdint>
#include <vector>

#include "base/macros.h"
#include "schedule/move.h"

namespace pycoll {

enum StepFlags : uint8_t {
  kReadLocal = 1,      // the local chunks are a source
  kWriteLocal = 2,     // the local chunks are a destination
  kFinal = 4,          // completes the reduction of these chunks: apply the op's last factor (avg)
  kMulticastSrc = 8,   // the source links are the peers' multicast rings
  kMulticastDst = 16,  // write this rank's multicast ring once; all other ranks read it
  kSamePhase = 32,     // belongs to the phase of the step before it
};

/// Maximum number of peers of one rank's program: they are the bits of a 64-bit mask. There may be
/// more ranks than that: rings and trees have few peers.
inline constexpr int kMaxPeers = 64;
/// Maximum number of steps of a phase: the operands of so many lie in a block's shared memory.
inline constexpr int kMaxPhaseSteps = 32;

struct Step {
  uint64_t src_peers = 0;  // bit i: read the next slot of the link from peers[i]
  uint64_t dst_peers = 0;  // bit i: write the next slot of the link to peers[i]
  int32_t first_chunk = 0;
  int32_t num_chunks = 1;
  int32_t round = 0;  // of the schedule, for pictures and error messages
  uint8_t flags = 0;
  uint8_t reserved[3] = {0, 0, 0};

  friend bool operator==(const Step&, const Step&) = default;
  ChunkRange chunks() const { return {first_chunk, num_chunks}; }
  PYCOLL_HD bool has(StepFlags flag) const { return (flags & flag) != 0; }
};
static_assert(sizeof(Step) == 32);

/// One past the last step of the phase that begins at `first`; `end`: one past the last step.
PYCOLL_HD inline int32_t phase_end(const Step* steps, int32_t first, int32_t end) {
  int32_t next = first + 1;
  while (next < end && steps[next].has(kSamePhase)) ++next;
  return next;
}

/// The steps at both ends of a program: the first ones wait for no message, and the last ones send
/// none. No step is both. If a program has no such last steps, num_first is 0.
struct StepEnds {
  int num_first;      // steps [0, num_first)
  int first_of_last;  // steps [first_of_last, num_steps)
};
inline StepEnds step_ends(const Step* steps, int num_steps) {
  StepEnds ends = {0, num_steps};
  while (ends.num_first < num_steps && steps[ends.num_first].src_peers == 0) ++ends.num_first;
  while (ends.first_of_last > ends.num_first && steps[ends.first_of_last - 1].dst_peers == 0) {
    --ends.first_of_last;
  }
  if (ends.first_of_last == num_steps) ends.num_first = 0;
  return ends;
}
/// How many first steps of the next tiles should precede the last steps of these
/// (interpret_together). None on one host, where no link needs it, and where a rank that trades
/// places must read before it writes again. Where several ranks share a host, only programs gain
/// that send all before they receive anything.
inline int num_steps_ahead(const StepEnds& ends, bool one_host, bool one_per_host) {
  if (one_host) return 0;
  return one_per_host || ends.num_first == ends.first_of_last ? ends.num_first : 0;
}

/// The buffers of a rank: the caller's two, and scratch memory of the library.
enum class BufferKind : uint8_t { kInput, kOutput, kScratch };
inline constexpr int kNumBuffers = 3;

/// The place of a step's local chunks (plan/place.h). An index counts blocks.
struct StepPlace {
  int32_t block = 0;        // the first block of the range, by its number in the world
  int32_t first_piece = 0;  // of the range in that block
  int32_t src_index = 0;    // with kReadLocal
  int32_t dst_index = 0;    // with kWriteLocal
  // For programs on the ranks' own buffers (plan/direct_plan.h): the block's index in the input of
  // all src_peers, and in the output of all dst_peers.
  int32_t peer_src_index = 0;
  int32_t peer_dst_index = 0;
  BufferKind src = BufferKind::kInput;
  BufferKind dst = BufferKind::kOutput;
};

/// What an executor reads of a program. Holds only pointers and numbers, so that it can be passed
/// as a kernel's argument.
struct ProgramView {
  const Step* steps = nullptr;
  const StepPlace* places = nullptr;  // one per step
  int32_t num_steps = 0;
  int32_t num_pieces = 1;  // chunks of a block
  const int32_t* peers = nullptr;
  int32_t self_position = 0;
};

/// The steps of one rank, in order, for one tile of the message.
struct Program {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  int32_t num_chunks = 1;  // of all blocks together; chunk c is a piece of block
                           // c / (num_chunks / num_blocks)
  int32_t num_blocks = 1;  // of all ranks together
  int32_t blocks_per_payload = 1;
  int32_t max_range = 1;       // longest chunk range of any step of any rank; it must fit a slot
  std::vector<int32_t> peers;  // ascending absolute ranks; the bits of the masks
  int32_t self_position =
      0;  // number of peers below `rank`: the place of local chunks in the order
  std::vector<Step> steps;
};

}  // namespace pycoll
