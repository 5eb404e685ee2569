// The user's file and line of a call, found in the interpreter's frames.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>

#include "comm/recorder.h"

namespace pycoll {

/// Maps the location of a call to the id of its text in the rank's records. A known location costs
/// one read of the frame and one table look-up. The GIL is held in every method.
class CallSites {
 public:
  CallSites();
  ~CallSites();
  CallSites(const CallSites&) = delete;
  CallSites& operator=(const CallSites&) = delete;

  /// Id of the innermost frame outside the package pycoll; 0 when there is none.
  uint16_t here(Recorder& recorder);

 private:
  static constexpr size_t kNumEntries = 64;

  struct Entry {
    PyCodeObject* code = nullptr;  // owned, so that its address is not used again
    int instruction = 0;
    bool inside = false;  // code of the package: its caller is the call site
    uint16_t id = 0;
  };

  const Entry& find(PyFrameObject* frame, Recorder& recorder);
  void fill(Entry& entry, PyFrameObject* frame, PyCodeObject* code, Recorder& recorder) const;
  std::string describe(PyFrameObject* frame, PyCodeObject* code) const;

  std::array<Entry, kNumEntries> entries_;
  std::string package_;  // its folder, with a slash
};

}  // namespace pycoll
