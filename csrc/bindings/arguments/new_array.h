// Arrays for results that the caller brought no array for.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace pycoll {

/// An uninitialised array of `num_rows` rows like x's, of x's dtype and library: NumPy's for what
/// has only the buffer protocol or DLPack, else whatever x.new_empty() makes (torch).
/// Raises UsageError when no such array can be made.
pybind11::object new_array(pybind11::handle x, int64_t num_rows);

}  // namespace pycoll
