// The C table of capi/pycoll.h as a PyCapsule, which extension modules of other libraries import.
#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "capi/table.h"

namespace pycoll {

void bind_capi(pybind11::module_& m) {
  m.attr("capi") = pybind11::capsule(capi_table(), PYCOLL_CAPI_NAME);
}

}  // namespace pycoll
