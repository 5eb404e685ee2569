// The user's file and line of a call, found in the interpreter's frames.
//
// torch has released the GIL when it calls a backend, and takes it again when the call returns. It
// is held here for the read of the frames.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>
#include <vector>

#include "torch/bridge/core.h"

namespace pycoll::torch_backend {

/// Maps the location of a call to its number among the names of a group's records. A known location
/// costs one look at each frame up to it. May be called by any thread.
class CallSites {
 public:
  CallSites() = default;
  ~CallSites();
  CallSites(const CallSites&) = delete;
  CallSites& operator=(const CallSites&) = delete;

  /// Number of the innermost frame outside torch and pycoll; 0 when there is none, as for a thread
  /// that runs no Python.
  uint16_t here(pycoll_comm* comm);

 private:
  static constexpr size_t kNumEntries = 256;

  struct Entry {
    PyCodeObject* code = nullptr;  // owned, so that its address is not used again
    int instruction = 0;
    bool inside = false;  // code of torch or pycoll: its caller is the call site
    uint16_t number = 0;
  };

  // With the GIL.
  const Entry& find(PyFrameObject* frame, pycoll_comm* comm);
  void fill(Entry& entry, PyFrameObject* frame, PyCodeObject* code, pycoll_comm* comm);
  bool is_inside(const std::string& file);

  std::array<Entry, kNumEntries> entries_;
  std::vector<std::string> folders_;  // of torch and pycoll, with a slash
};

}  // namespace pycoll::torch_backend
