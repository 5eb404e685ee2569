// The interpreter with several tiles in flight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "executor/interpret.h"

namespace pycoll {

/// Like interpret(), with `num_together` tiles in flight: each step runs for all of them before the
/// next step, so while the messages of one tile travel, those of the other tiles are sent. This
/// suits links whose latency is long compared with the work of their ranks, and ranks that would
/// write one message and read one in turn. Both ends of a link must use the same number.
///
/// Needs `num_together` times the slots with which the program is proved. The messages of a step
/// are then equivalent to one message that takes `num_together` slots. The programs are a Kahn
/// network, so if one order of execution completes, all do.
template <class Protocol, class Target>
bool interpret_together(Target& target, const ProgramView& program, const Payload& payload,
                        int64_t num_together) {
  const int64_t stride = payload.tile_stride * payload.tile_count;
  for (int64_t first = payload.first_tile * payload.tile_count; first < payload.count;
       first += num_together * stride) {
    const int64_t end = std::min(first + num_together * stride, payload.count);
    for (int i = 0; i < program.num_steps; ++i) {
      for (int64_t done = first; done < end; done += stride) {
        if (!run_step<Protocol>(target, program, payload, program.steps[i], program.places[i], i,
                                done)) {
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace pycoll
