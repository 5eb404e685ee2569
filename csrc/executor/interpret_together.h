// The interpreter with several tiles in flight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "executor/interpret.h"
#include "executor/protocol.h"

namespace pycoll {

/// Like interpret(), with `num_together` tiles in flight: each step runs for all of them before the
/// next step, so while the messages of one tile travel, those of the other tiles are sent. This
/// suits links whose latency is long compared with the work of their ranks, and ranks that would
/// write one message and read one in turn. Both ends of a link must use the same number.
///
/// Needs `num_together` times the slots with which the program is proved. The messages of a step
/// are then equivalent to one message that takes `num_together` slots. The programs are a Kahn
/// network, so if one order of execution completes, all do.
///
/// `ends` are those of the program, with as many first steps as should be sent ahead, or none:
/// before a rank waits for the last messages of these tiles, it sends the first ones of the next
/// tiles, so a link with a long latency stays busy. This changes no link's order of messages: the
/// steps that come first only send, and those that they overtake only receive. A step is brought
/// forward only while no link of it lacks credits, so no rank waits where it would not wait
/// otherwise. Credits say nothing about traded places (TradedPlaces), so there it must be none.
///
/// `meanwhile(first, end)`: called for these elements of each group of tiles, when all its messages
/// have been sent and the last ones are on their way.
template <class Protocol, class Target, class Meanwhile>
bool interpret_together(Target& target, const ProgramView& program, const Payload& payload,
                        int64_t num_together, const StepEnds& ends, const Meanwhile& meanwhile) {
  const int64_t stride = payload.tile_stride * payload.tile_count;
  const int64_t group = num_together * stride;
  const auto run = [&](int first_step, int end_step, int64_t first) {
    const int64_t end = std::min(first + group, payload.count);
    for (int i = first_step; i < end_step; ++i) {
      for (int64_t done = first; done < end; done += stride) {
        if (!run_step<Protocol>(target, program, payload, program.steps[i], program.places[i], i,
                                done)) {
          return false;
        }
      }
    }
    return true;
  };
  int num_done = 0;  // steps of the group that have been brought forward
  for (int64_t first = payload.first_tile * payload.tile_count; first < payload.count;
       first += group) {
    if (!run(num_done, ends.first_of_last, first)) return false;
    num_done = 0;
    while (num_done < ends.num_first && first + group < payload.count &&
           has_credits(target, program, program.steps[num_done],
                       static_cast<uint64_t>(num_together))) {
      if (!run(num_done, num_done + 1, first + group)) return false;
      ++num_done;
    }
    meanwhile(first, std::min(first + group, payload.count));
    if (!run(ends.first_of_last, program.num_steps, first)) return false;
  }
  return true;
}

}  // namespace pycoll
