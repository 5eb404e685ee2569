// C++ exceptions become the classes of pycoll.errors.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace pycoll {

/// Registers the translation for every function of the module.
void register_errors(pybind11::module_& m);

/// Sets the Python error for `error`, for functions that are called without pybind11's dispatcher.
/// Needs the GIL.
void set_python_error(std::exception_ptr error);

}  // namespace pycoll
