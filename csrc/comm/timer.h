// Times calls of one collective as a program would make them: one after another, on the caller's
// buffers.
#pragma once

#include <string_view>

#include "comm/communicator.h"

namespace pycoll {

/// Buffers of one message each.
struct TimedBuffers {
  void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;  // elements of the message
  DType dtype = DType::kF32;
};

/// Seconds per call on this rank, after a barrier and one or two calls that are not timed. All
/// ranks call this alike. `algorithm` is "", "NAME" or "NAME/PROTOCOL"; reductions are sums, roots
/// are 0.
double time_calls(Communicator& comm, Collective collective, const TimedBuffers& buffers,
                  std::string_view algorithm, int64_t num_calls);

}  // namespace pycoll
