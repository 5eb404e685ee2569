// The user's file and line of a call, found in the interpreter's frames without Python's lock.
//
// torch has released the GIL when it calls a backend. Taking it again would cost a tenth of a small
// message, and a wait whenever another thread holds it. But the frames of the calling thread do not
// change during the call, so they can be read. Their memory layout depends on Python's version:
// when the module is loaded, the frames as read are compared with those that Python reports, and
// where they differ no call sites are recorded.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {

/// Checks the layout of frames. Called once, when the module is loaded, with the GIL.
void check_frames();

/// Maps the location of a call to its number among the names of a group's records. A known location
/// costs one read of each frame up to it; a new location takes the GIL.
class CallSites {
 public:
  /// Number of the innermost frame outside torch and pycoll; 0 when there is none or the table is
  /// full.
  uint16_t here(pycoll_comm* comm);

 private:
  static constexpr size_t kNumSites = 512;

  std::array<std::atomic<uint16_t>, kNumSites> numbers_{};  // by the process's location number
};

}  // namespace pycoll::torch_backend
