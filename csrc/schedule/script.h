// A rank's program as the simulator sees it: for each step the ranks it waits for, the ranks it
// sends to, and its part of the message. Repeated steps are stored once, as a loop, so that a ring
// of 10,000 ranks takes a few numbers each and not 200 million steps.
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
  double fraction = 0;       // size of every operand, as a part of the message
};

/// Steps [first_step, first_step + num_steps), run `count` times.
struct ScriptLoop {
  int32_t first_step = 0;
  int32_t num_steps = 0;
  int64_t count = 1;
};

/// Loops that run one after another; the whole script runs once per tile.
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

  /// Appends a step, as its own loop or to the loop that `begin_loop` has begun.
  void add(std::span<const int32_t> srcs, std::span<const int32_t> dsts, bool reads_local,
           double fraction);
  /// Begins a loop: the steps added after it repeat `count` times. A loop without steps is dropped.
  void begin_loop(int64_t count);
  void end_loop();
  /// Appends `other` to run after this script. Its ranks become `rank_of[rank]`, and its fractions
  /// are multiplied by `scale`.
  void append(const Script& other, std::span<const int32_t> rank_of, double scale);

 private:
  bool is_looping_ = false;
};

/// The script of a lowered program. The destinations of a step are ordered by their distance in the
/// order of ranks, as in simulate.h.
Script script_of(const Program& program);

}  // namespace pycoll
