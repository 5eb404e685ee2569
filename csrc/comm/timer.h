// Times consecutive calls of one collective on the caller's buffers.
#pragma once

#include <string_view>

#include "comm/communicator.h"

namespace pycoll {

/// Input and output of the timed calls.
struct TimedBuffers {
  void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;  // elements of the message
  DType dtype = DType::kF32;
};

/// Returns the seconds per call on this rank, after a barrier and one or two untimed calls.
/// Collective, with identical arguments on all ranks. `algorithm` is "", "NAME" or "NAME/PROTOCOL";
/// reductions are sums, roots are 0.
double time_calls(Communicator& comm, Collective collective, const TimedBuffers& buffers,
                  std::string_view algorithm, int64_t num_calls);

}  // namespace pycoll
