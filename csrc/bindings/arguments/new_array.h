// New arrays for results, where the caller passes no `out`.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace pycoll {

/// An uninitialised array of `num_rows` rows like x's, of x's dtype: the result of x.new_empty()
/// where x has that method (torch), else a NumPy array.
/// Raises UsageError when no such array can be made.
pybind11::object new_array(pybind11::handle x, int64_t num_rows);

}  // namespace pycoll
