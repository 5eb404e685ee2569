// The one interpreter. It walks a rank's program tile by tile; how a team of threads works together
// is the Target, how bytes and flags travel is the Protocol.
//
// A Target is HostThread (host.h), ThreadBlock (thread_block.h) or CudaBlock. It gives:
//   Links& links(), element_size(), is_leader(), sync(), agree(bool), spin_until(ready, site),
//   digest(), and the arithmetic that its protocols call.
// A Protocol is Simple or LowLatency (protocol.h): bool run(target, program, operands), false when
// a wait failed, which ends the program; the caller then raises what the waiter knows.
#pragma once

#include <cstdint>

#include "base/macros.h"
#include "schedule/simulate.h"
#include "schedule/step.h"

namespace pycoll {

/// The caller's message. `input` and `output` may be the same memory.
struct Message {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  int64_t count = 0;       // elements
  int64_t tile_count = 0;  // elements of one tile
};

/// One step of one tile, with the tile's clipping done.
struct StepOperands {
  const Step* step = nullptr;
  int index = 0;                         // of the step in its program
  const std::byte* local_src = nullptr;  // null: the local chunks are no source
  std::byte* local_dst = nullptr;        // null: the local chunks are no destination
  int64_t count = 0;                     // elements
};

template <class Protocol, class Target>
PYCOLL_HD bool interpret(Target& target, const ProgramView& program, const Message& message) {
  const auto element_size = static_cast<int64_t>(target.element_size());
  for (int64_t done = 0; done < message.count; done += message.tile_count) {
    const int64_t left = message.count - done;
    const int64_t tile = left < message.tile_count ? left : message.tile_count;
    for (int i = 0; i < program.num_steps; ++i) {
      const Step& step = program.steps[i];
      const int64_t first = chunk_start(tile, program.num_chunks, step.first_chunk);
      const int64_t last =
          chunk_start(tile, program.num_chunks, step.first_chunk + step.num_chunks);
      if (first == last) continue;  // both ends of every link skip it alike
      const int64_t offset = (done + first) * element_size;
      StepOperands operands;
      operands.step = &step;
      operands.index = i;
      operands.count = last - first;
      if (step.has(kReadLocal)) {
        operands.local_src = (step.has(kReadInput) ? message.input : message.output) + offset;
      }
      if (step.has(kWriteLocal)) operands.local_dst = message.output + offset;
      if (!Protocol::run(target, program, operands)) return false;
    }
  }
  return true;
}

}  // namespace pycoll
