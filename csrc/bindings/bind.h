// One function per layer that has something to show to Python.
#pragma once

#include <pybind11/pybind11.h>

namespace pycoll {

void bind_schedule(pybind11::module_& m);
void bind_reduce(pybind11::module_& m);
void bind_bootstrap(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);

}  // namespace pycoll
