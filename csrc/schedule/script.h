// A rank's program as time sees it: whom it waits for, to whom it sends, and which part of the
// message. What repeats is kept once, as a loop, so that 10,000 ranks of a ring are a few numbers
// each and not 200 million steps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/step.h"

namespace pycoll {

struct ScriptStep {
  int32_t first_peer = 0;  // in Script::peers: first the sources, then the destinations
  int32_t num_srcs = 0;
  int32_t num_dsts = 0;
  int32_t num_combined = 0;  // operands after the first: each costs gamma per byte
  double fraction = 0;       // of the message, of every operand
};

/// Steps [first_step, first_step + num_steps), `count` times over.
struct ScriptLoop {
  int32_t first_step = 0;
  int32_t num_steps = 0;
  int64_t count = 1;
};

/// Loops run one after another; the whole script once per tile.
struct Script {
  std::vector<ScriptLoop> loops;
  std::vector<ScriptStep> steps;
  std::vector<int32_t> peers;  // ranks

  std::span<const int32_t> srcs(const ScriptStep& step) const {
    return {peers.data() + step.first_peer, static_cast<size_t>(step.num_srcs)};
  }
  std::span<const int32_t> dsts(const ScriptStep& step) const {
    return {peers.data() + step.first_peer + step.num_srcs, static_cast<size_t>(step.num_dsts)};
  }
  int64_t num_steps() const;

  /// Appends a step as a loop of its own, or to the loop that `begin_loop` has begun.
  void add(std::span<const int32_t> srcs, std::span<const int32_t> dsts, bool reads_local,
           double fraction);
  /// Steps that are added from here on repeat `count` times; without steps the loop is dropped.
  void begin_loop(int64_t count);
  void end_loop();
  /// `other` runs after this; its ranks become `rank_of[rank]`, its fractions `scale` times as
  /// much.
  void append(const Script& other, std::span<const int32_t> rank_of, double scale);

 private:
  bool is_looping_ = false;
};

/// What a lowered program looks like in time; a destination that is nearer in the order of ranks
/// comes first, as in simulate.h.
Script script_of(const Program& program);

}  // namespace pycoll
