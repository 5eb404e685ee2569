// One bind function for each layer that Python uses.
#pragma once

#include <pybind11/pybind11.h>

namespace pycoll {

void bind_schedule(pybind11::module_& m);
void bind_reduce(pybind11::module_& m);
void bind_operators(pybind11::module_& m);
void bind_bootstrap(pybind11::module_& m);
void bind_mpi(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);
void bind_tuning(pybind11::module_& m);
void bind_topology(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_records(pybind11::module_& m, pybind11::handle communicator_type);

/// Adds the collectives to the class that bind_communicator makes.
void bind_collectives(pybind11::handle communicator_type);
/// Adds send and recv to the same class.
void bind_point_to_point(pybind11::module_& m, pybind11::handle communicator_type);

}  // namespace pycoll
