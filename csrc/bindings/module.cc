// The Python module pycoll._core: calls the bind function of each layer.
#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "bindings/errors.h"
#include "bootstrap/local/process_info.h"
#include "capi/c_table.h"
#include "mpi/mpi.h"
#include "reduce/reduce_copy.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "pycoll's core: schedules, proofs, transports and the executor";
  pycoll::register_errors(m);
  pycoll::bind_schedule(m);
  pycoll::bind_reduce(m);
  pycoll::bind_operators(m);
  pycoll::bind_bootstrap(m);
  pycoll::bind_mpi(m);
  pycoll::bind_communicator(m);
  pycoll::bind_tuning(m);
  pycoll::bind_topology(m);
  pycoll::bind_memory(m);
  pycoll::bind_device(m);
  // The table of functions for other libraries (capi/pycoll.h), such as the torch backend.
  m.attr("capi") = pybind11::capsule(pycoll::capi_table(), PYCOLL_CAPI_NAME);
  m.def(
      "build_info",
      [] {
        py::dict facts;
        facts["compiler"] = PYCOLL_COMPILER;
        facts["build_type"] = PYCOLL_BUILD_TYPE;
        facts["isa"] = pycoll::reduce_copy_isa();
        constexpr pid_t kThisThread = 0;
        facts["cores"] = pycoll::num_usable_cores({&kThisThread, 1});
        py::list transports;
        for (const char* name : {"local", "shm", "tcp"}) transports.append(name);
        if (!pycoll::mpi_abis().empty()) transports.append("mpi");
        facts["transports"] = py::tuple(transports);
        return facts;
      },
      "Features of this build of the core.");
}
