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

/// The memory that a call points to. It must live until the call has finished.
struct Operands {
  std::optional<ArrayView> x;
  std::optional<ArrayView> out;
  std::vector<int64_t> block_counts;
  std::vector<int64_t> send_counts;
  std::vector<int64_t> recv_counts;
};

/// Rows of each block, as the caller counts them. Read before the arrays: a number's `__index__`
/// may change an array.
struct RowCounts {
  std::vector<int64_t> counts;
  std::vector<int64_t> send_counts;
  std::vector<int64_t> recv_counts;
};

struct Invocation {
  PyObject* self;
  CommunicatorObject& object;
  const Arguments& args;
  Call call = {};
  bool is_async = false;            // read before the arrays, as `rows`
  const RowCounts* rows = nullptr;  // of a collective that takes counts
  int64_t nbytes = 0;               // size of the input or the output, whichever is larger
  Operands operands = {};
  pybind11::object result = {};  // return value in Python; null: None
};

/// Common path of all calls: queues the call and returns a Work with async_op, else runs it on this
/// thread. Returns a new reference.
PyObject* run_or_start(Invocation& in);

/// Raises UsageError for an asynchronous operation of a coalesced group.
void refuse_async_in_batch(bool is_async);

/// Runs `call` on this thread; keeps the GIL while the call is short.
void run_here(CommunicatorObject& object, Call& call, int64_t nbytes);

/// Runs `body` and turns its C++ exceptions into Python errors.
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
