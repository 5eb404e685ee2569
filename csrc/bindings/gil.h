// Releases the GIL around a call of the core, once the call turns slow.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "executor/wait/wait.h"

namespace pycoll {

/// Releases the GIL at once or on request, and takes it back at the end.
class LazyGilRelease {
 public:
  explicit LazyGilRelease(bool at_once) {
    if (at_once) release();
  }
  ~LazyGilRelease() {
    if (state_ == nullptr) return;
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      // The interpreter has ended meanwhile, and Python unwinds this thread (pthread_exit). The
      // callers need the GIL, so the thread sleeps until the process ends, as Python 3.14 does.
      while (true) pause();
    }
  }
  LazyGilRelease(const LazyGilRelease&) = delete;
  LazyGilRelease& operator=(const LazyGilRelease&) = delete;

  void release() {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }
  OnSlow on_slow() {
    return {[](void* self) { static_cast<LazyGilRelease*>(self)->release(); }, this};
  }

 private:
  PyThreadState* state_ = nullptr;
};

/// An object that must live until an operation has ended, on any thread. Freed under the GIL.
template <class Kept>
std::shared_ptr<void> keep_alive(Kept kept) {
  return {new Kept(std::move(kept)), [](void* pointer) {
            const pybind11::gil_scoped_acquire gil;
            delete static_cast<Kept*>(pointer);
          }};
}

}  // namespace pycoll
