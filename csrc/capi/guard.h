// No exception leaves the C functions: it becomes a code and a text.
#pragma once

#include <exception>
#include <utility>

#include "capi/pycoll.h"

namespace pycoll {

/// The code of `raised`; its text goes to `error`.
int describe_error(const std::exception_ptr& raised, pycoll_error* error);
/// Raises the error of that code, with that text.
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
