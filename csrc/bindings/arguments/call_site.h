// The user's file and line of a call, found in the interpreter's frames.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>

#include "comm/recorder.h"

namespace pycoll {

/// Turns the place that calls into the id of its text in the rank's records. A place that was seen
/// before costs a look at the frame and one entry of a table. The GIL is held in every method.
class CallSites {
 public:
  CallSites();
  ~CallSites();
  CallSites(const CallSites&) = delete;
  CallSites& operator=(const CallSites&) = delete;

  /// Of the innermost frame outside the package pycoll; 0 when there is none.
  uint16_t here(Recorder& recorder);

 private:
  static constexpr size_t kNumEntries = 64;

  struct Entry {
    PyCodeObject* code = nullptr;  // owned, so that its address is not used again
    int instruction = 0;
    bool inside = false;  // of the package: who called it is meant
    uint16_t id = 0;
  };

  const Entry& find(PyFrameObject* frame, Recorder& recorder);
  void fill(Entry& entry, PyFrameObject* frame, PyCodeObject* code, Recorder& recorder) const;
  std::string describe(PyFrameObject* frame, PyCodeObject* code) const;

  std::array<Entry, kNumEntries> entries_;
  std::string package_;  // its folder, with a slash
};

}  // namespace pycoll
