// What Python's Communicator holds.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "base/error.h"
#include "bindings/arguments/call_site.h"
#include "bindings/arguments/registration_cache.h"
#include "comm/coalesce.h"
#include "comm/communicator.h"

namespace pycoll {

struct CommunicatorObject {
  CommunicatorObject() = default;
  CommunicatorObject(CommunicatorObject&&) = default;
  ~CommunicatorObject() {
    if (comm == nullptr) return;
    // Closing waits for the progress thread, which takes the GIL to let go of its arrays.
    const pybind11::gil_scoped_release gil;
    Communicator::retire(std::move(comm));
  }

  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Batch> batch;  // within `with comm.coalesce()`
  std::unique_ptr<CallSites> sites;
  std::unique_ptr<RegistrationCache> registration_cache;  // null where an array has nothing to gain
  bool ranks_are_threads = false;
  bool deterministic = false;  // of calls that do not say
  uint8_t barrier_token = 0;   // what a barrier reduces
};

/// Of `self` in a method of the class: Python has checked its type, so the dispatcher's look-up,
/// which costs a tenth of a small call, is not needed.
inline CommunicatorObject& object_of(PyObject* self) {
  void* object =
      reinterpret_cast<pybind11::detail::instance*>(self)->get_value_and_holder().value_ptr();
  if (object == nullptr) throw UsageError("this communicator was never initialised");
  return *static_cast<CommunicatorObject*>(object);
}

}  // namespace pycoll
