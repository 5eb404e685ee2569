// Gives Python's lock up around a call of the core, if and when that pays.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "executor/wait/wait.h"

namespace pycoll {

/// Gives the GIL up at once or when told so, and takes it back at the end.
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
      // The interpreter has ended meanwhile, and Python unwinds this thread (pthread_exit). What is
      // further up needs the GIL; the thread sleeps until the process is gone, as from 3.14 on.
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

/// What must live until something is over that may end on any thread. Freed under the GIL.
template <class Kept>
std::shared_ptr<void> keep_alive(Kept kept) {
  return {new Kept(std::move(kept)), [](void* pointer) {
            const pybind11::gil_scoped_acquire gil;
            delete static_cast<Kept*>(pointer);
          }};
}

}  // namespace pycoll
