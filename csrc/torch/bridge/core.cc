#include "torch/bridge/core.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pycoll::torch_backend {
namespace {

const pycoll_api* table = nullptr;

bool is_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

}  // namespace

const pycoll_api& core() { return *table; }

void set_core(const pycoll_api* api) {
  TORCH_CHECK(api->version == PYCOLL_CAPI_VERSION && api->size >= sizeof(pycoll_api),
              "pycoll's torch backend was built for another pycoll._core (table version ",
              PYCOLL_CAPI_VERSION, " of ", sizeof(pycoll_api), " bytes, found ", api->version,
              " of ", api->size, "): remove the file and import pycoll.torch again");
  table = api;
}

int interrupted() {
  // Python runs signal handlers on its main thread only; other threads need not wait for the GIL.
  if (!is_main_thread() || Py_IsInitialized() == 0) return 0;
  const pybind11::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0 ? 1 : 0;
}

void raise_signals() {
  if (interrupted() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  throw pybind11::error_already_set();
}

pycoll_error make_error(int code, const std::string& text) {
  pycoll_error error = {.code = code, .rank = -1, .signal = 0, .message = {}};
  text.copy(error.message, sizeof(error.message) - 1);
  return error;
}

void raise_core_error(int code, const pycoll_error& error) {
  if (code == PYCOLL_ABORTED_ERROR && is_main_thread() && Py_IsInitialized() != 0) {
    // A signal handler's error takes precedence over the errors that it caused.
    const pybind11::gil_scoped_acquire gil;
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  }
  // torch's own text for a timeout: programs search for it.
  const char* const timed_out = code == PYCOLL_TIMEOUT_ERROR ? "Timed out waiting: " : "";
  const std::string text = "pycoll: " + (timed_out + std::string(error.message));
  if (code == PYCOLL_USAGE_ERROR) C10_THROW_ERROR(ValueError, text);
  C10_THROW_ERROR(DistBackendError, text);
}

}  // namespace pycoll::torch_backend
