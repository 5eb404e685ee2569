#include "comm/timer.h"

#include "base/clock.h"
#include "base/error.h"

namespace pycoll {

double time_calls(Communicator& comm, Collective collective, const TimedBuffers& buffers,
                  std::string_view algorithm, int64_t num_calls) {
  const int blocks = info(collective).blocks_per_payload(comm.size());
  if (buffers.count < blocks || num_calls < 1) {
    throw UsageError("expected at least " + std::to_string(blocks) + " elements and 1 call, got " +
                     std::to_string(buffers.count) + " and " + std::to_string(num_calls));
  }
  Call call;
  call.collective = collective;
  call.input = buffers.input;
  // In place, like Python's broadcast: the root has nothing to copy.
  call.output = collective == Collective::kBroadcast ? buffers.input : buffers.output;
  call.count = buffers.count / blocks;
  call.dtype = buffers.dtype;
  call.num_dims = 1;
  call.shape[0] = call.count;
  call.algorithm = algorithm;
  const int num_untimed =
      num_calls > 1 ? 2 : 1;  // a single timed call takes long, so one untimed call is enough
  for (int i = 0; i < num_untimed; ++i) comm.run(call);
  comm.barrier();
  const int64_t start = now_ns();
  for (int64_t i = 0; i < num_calls; ++i) comm.run(call);
  return static_cast<double>(now_ns() - start) * 1e-9 / static_cast<double>(num_calls);
}

}  // namespace pycoll
