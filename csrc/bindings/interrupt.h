// Runs Ctrl-C and other Python signal handlers during waits that have released the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "base/clock.h"
#include "base/thread.h"

namespace pycoll {

/// Runs pending Python signal handlers, on the main thread only, as Python does: another thread
/// need not wait for the GIL, which it must not ask for once the interpreter has ended. Returns
/// whether a handler raised an exception, which is set then.
inline bool signal_handlers_raise() {
  if (!is_main_thread()) return false;
  const pybind11::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

/// Runs pending Python signal handlers; an exception of theirs ends the wait.
inline void run_signal_handlers() {
  if (!signal_handlers_raise()) return;
  const pybind11::gil_scoped_acquire gil;
  throw pybind11::error_already_set();
}

inline Deadline interruptible_deadline(double timeout_s) {
  return Deadline::after_s(timeout_s, run_signal_handlers);
}

}  // namespace pycoll
