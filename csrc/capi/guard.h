// Turns exceptions into a code and a text, so that none leaves the C functions.
#pragma once

#include <exception>
#include <utility>

#include "capi/pycoll.h"

namespace pycoll {

/// Returns the code of `raised` and stores its text in `error`.
int describe_error(const std::exception_ptr& raised, pycoll_error* error);
/// Raises the exception that belongs to `error.code`, with the text of `error`.
[[noreturn]] void raise_described(const pycoll_error& error);

template <class Body>
int guarded_call(pycoll_error* error, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (...) {
    return describe_error(std::current_exception(), error);
  }
}

}  // namespace pycoll
