// The user's file and line of a call, found in the interpreter's frames without Python's lock.
//
// torch has let go of the lock when it calls a backend. Taking it again would cost a small message
// a tenth, and a wait wherever another thread has taken it. But the frames of the calling thread
// stand still while it is here: they can be read. How they lie in memory depends on Python's
// version; when the module is loaded, what is read is compared with what Python itself says, and
// where they differ no places are known.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {

/// Called once, when the module is loaded, with the GIL.
void check_frames();

/// Turns the place that calls into its number among the names of a group's records. A place that
/// was seen before costs a look at each frame from there down to here; a new one takes the GIL.
class CallSites {
 public:
  /// Of the innermost frame outside torch and pycoll; 0 when there is none, or no more room.
  uint16_t here(pycoll_comm* comm);

 private:
  static constexpr size_t kNumSites = 512;

  std::array<std::atomic<uint16_t>, kNumSites> numbers_{};  // by the place's number in the process
};

}  // namespace pycoll::torch_backend
