// The core for the shim: the C table, and an owner for each communicator.
#pragma once

#include <string>

#include "capi/pycoll.h"

namespace pycoll::torch_backend {

/// The table of `pycoll._core`. Raises if its version differs. Set once, when the
/// module is loaded (module.cc).
const pycoll_api& core();
void set_core(const pycoll_api* api);

/// An error with this text, cut to what fits.
pycoll_error make_error(int code, const std::string& text);

/// Raises the error that a function of the table has returned: ValueError for a wrong call, else
/// torch.distributed.DistBackendError, with the core's text.
[[noreturn]] void raise_core_error(int code, const pycoll_error& error);
inline void check(int code, const pycoll_error& error) {
  if (code != PYCOLL_OK) [[unlikely]]
    raise_core_error(code, error);
}
/// Runs Python's signal handlers on the main thread, and raises their errors (Ctrl-C).
void raise_signals();
/// Runs the signal handlers for the core; not 0 when a handler raised. The error is raised later,
/// by raise_core_error().
int interrupted();

/// A communicator of the core.
class Comm {
 public:
  Comm() = default;
  explicit Comm(pycoll_comm* comm) : comm_(comm) {}
  ~Comm() {
    if (comm_ != nullptr) core().release(comm_);
  }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  pycoll_comm* get() const { return comm_; }

 private:
  pycoll_comm* comm_ = nullptr;
};

}  // namespace pycoll::torch_backend
