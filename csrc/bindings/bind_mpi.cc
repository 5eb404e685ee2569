// The submodule `pycoll._core.mpi`: the MPI of this process. Calls release the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/bind.h"
#include "bindings/interrupt.h"
#include "mpi/mpi.h"

namespace pycoll {

namespace py = pybind11;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

namespace {

py::dict facts() {
  const MpiLibraryFacts library = mpi_library_facts();
  py::dict result;
  result["abis"] = mpi_abis();
  result["path"] = library.path;
  result["abi"] = library.abi;
  const Mpi* running = running_mpi();
  result["version"] = running == nullptr ? std::string() : running->version();
  return result;
}

}  // namespace

void bind_mpi(py::module_& m) {
  py::module_ sub = m.def_submodule("mpi", "The MPI of this process.");
  py::class_<MpiComm, std::shared_ptr<MpiComm>>(
      sub, "Comm", "Communicator of MPI: exchanges messages between its ranks.")
      .def_property_readonly("rank", &MpiComm::rank)
      .def_property_readonly("size", &MpiComm::size)
      .def(
          "exchange",
          [](MpiComm& self, const std::string& own, double timeout_s) {
            std::vector<std::string> all;
            {
              const py::gil_scoped_release gil;
              all = self.exchange(own, interruptible_deadline(timeout_s));
            }
            return std::vector<py::bytes>(all.begin(), all.end());
          },
          py::arg("own"), py::arg("timeout_s"));
  sub.def(
      "world",
      [](double timeout_s) { return mpi().duplicate_world(interruptible_deadline(timeout_s)); },
      py::arg("timeout_s"), ReleaseGil());
  sub.def("set_folder", &set_mpi_folder, py::arg("folder"));
  sub.def("facts", &facts);
  sub.def("shares_library_with", &shares_mpi_with, py::arg("path"), ReleaseGil());
  sub.def(
      "finish",
      [](bool in_order) {
        if (Mpi* running = running_mpi()) running->finish(in_order);
      },
      py::arg("in_order"), ReleaseGil());
}

}  // namespace pycoll
