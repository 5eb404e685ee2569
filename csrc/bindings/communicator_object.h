// The C++ state of Python's Communicator.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <new>
#include <vector>

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
    // Closing waits for the progress thread, which takes the GIL to release its arrays.
    const pybind11::gil_scoped_release gil;
    Communicator::retire(std::move(comm));
  }

  /// Zeroed, because pybind11 passes the memory of an object whose __init__ has not run.
  static void* operator new(size_t size) { return std::memset(::operator new(size), 0, size); }
  static void operator delete(void* object) { ::operator delete(object); }

  /// Raises UsageError if __init__ has not run, or another object has taken the communicator.
  Communicator& core() const {
    if (comm == nullptr) [[unlikely]]
      throw UsageError("this communicator was never initialised");
    return *comm;
  }

  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Batch> batch;  // set within `with comm.coalesce()`
  std::unique_ptr<CallSites> sites;
  std::unique_ptr<RegistrationCache> registration_cache;  // null where registering gains nothing
  bool ranks_are_threads = false;
  bool deterministic = false;  // default of calls without the argument
  uint8_t barrier_token = 0;   // the operand of a barrier
};

/// The object of `self` in a method of the class. Python has checked its type, so this skips the
/// look-up of pybind11's dispatcher, which costs a tenth of a small call.
inline CommunicatorObject& object_of(PyObject* self) {
  void* object =
      reinterpret_cast<pybind11::detail::instance*>(self)->get_value_and_holder().value_ptr();
  if (object == nullptr) throw UsageError("this communicator was never initialised");
  auto& found = *static_cast<CommunicatorObject*>(object);
  found.core();
  return found;
}

/// For waits: raises PeerDiedError if one of `members` of `old` on this host has ended. Both
/// outlive the waits.
inline Deadline::Interrupt watch_of(const CommunicatorObject& old,
                                    const std::vector<int>& members) {
  return [&old, &members] { old.core().check_alive_here(members); };
}

}  // namespace pycoll
