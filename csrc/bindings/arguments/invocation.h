// One call of a method on its way from Python to the core.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <optional>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/array.h"
#include "bindings/communicator_object.h"
#include "bindings/errors.h"
#include "comm/communicator.h"

namespace pycoll {

/// The memory that a call points to: must live until it is over.
struct Operands {
  std::optional<ArrayView> x;
  std::optional<ArrayView> out;
  std::vector<int64_t> block_counts;
  std::vector<int64_t> send_counts;
  std::vector<int64_t> recv_counts;
};

struct Invocation {
  PyObject* self;
  CommunicatorObject& object;
  const Arguments& args;
  Call call = {};
  int64_t nbytes = 0;  // the larger one of what goes in and what comes out
  Operands operands = {};
  pybind11::object result = {};  // what Python gets in the end; null: None
};

/// Where every call passes: with async_op it is queued and a Work comes back, else it runs here.
/// Returns a new reference.
PyObject* run_or_start(Invocation& in);

/// Raises UsageError for an asynchronous operation of a coalesced group.
void refuse_async_in_batch(PyObject* async_op);

/// Runs `call` on this thread; keeps the GIL for as long as that pays.
void run_here(CommunicatorObject& object, Call& call, int64_t nbytes);

/// Runs `body` and turns what it throws into a Python error.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

}  // namespace pycoll
