// One shot: every rank sends its whole message to all, and each reduces everything itself.
//
// Cost: (n-1)(alpha + beta N) + (n-1) gamma N. Each rank sends n-1 messages, or writes one slot
// that all others read, in one round, which suits the smallest messages.
// Source: the "one-shot" all-reduce of FasterTransformer and vLLM's custom_all_reduce (2023).
#include "algorithms/table/registry.h"

namespace pycoll {

Schedule one_shot_all_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllReduce, "one_shot", num_ranks, /*num_chunks=*/1, root);
  for (int src = 0; src < num_ranks; ++src) {
    for (int dst = 0; dst < num_ranks; ++dst) {
      if (src != dst) builder.reduce(0, {0}, src, dst);
    }
  }
  return builder.build();
}

}  // namespace pycoll
