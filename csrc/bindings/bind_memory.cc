// Memory that peers reach directly, as an object with the buffer protocol. NumPy and torch make
// their arrays over it (pycoll/memory.py); it is freed when the last of them is gone.
#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "comm/memory.h"

namespace pycoll {
namespace py = pybind11;

void bind_memory(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def_property_readonly("nbytes", [](const SharedMemory& memory) { return memory.nbytes(); })
      .def_buffer([](const SharedMemory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.nbytes()));
      });
}

}  // namespace pycoll
