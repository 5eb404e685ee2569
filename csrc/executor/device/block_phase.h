// A phase as a block runs it: several steps, whose operands the block shares, and for each link the
// step that uses it.
#pragma once

#include "executor/device/device_launch.h"
#include "executor/interpret.h"

namespace pycoll {

/// A step in memory that the block shares.
struct BlockStep {
  StepOperands operands;
  int32_t first_src;  // places of its operands in BlockOperands
  int32_t first_dst;
};

/// The step of the phase that uses the link with a peer, by the peer's bit; -1: there is none.
/// Thread i writes and reads the entries of peer i.
struct BlockLinkSteps {
  int8_t srcs[kMaxDeviceRanks];
  int8_t dsts[kMaxDeviceRanks];
};

/// The steps of one phase. Has the members of OneStep.
struct BlockPhase {
  const BlockStep* steps;
  int num_steps;
  const BlockLinkSteps* links;

  PYCOLL_HD int size() const { return num_steps; }
  PYCOLL_HD const StepOperands& operator[](int i) const { return steps[i].operands; }
  PYCOLL_HD int step_of(int position, uint64_t Step::* peers) const {
    return (peers == &Step::src_peers ? links->srcs : links->dsts)[position];
  }
  PYCOLL_HD int first_src(int i) const { return steps[i].first_src; }
  PYCOLL_HD int first_dst(int i) const { return steps[i].first_dst; }
};

}  // namespace pycoll
