// Runs Ctrl-C and other Python signal handlers during waits that have released the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "base/clock.h"

namespace pycoll {

/// Runs pending Python signal handlers; an exception of theirs ends the wait.
inline void run_signal_handlers() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

inline Deadline interruptible_deadline(double timeout_s) {
  return Deadline::after_s(timeout_s, run_signal_handlers);
}

}  // namespace pycoll
