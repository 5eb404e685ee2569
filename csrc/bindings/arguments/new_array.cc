#include "bindings/arguments/new_array.h"

#include <pybind11/numpy.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace pycoll {
namespace py = pybind11;

namespace {

py::object numpy_view(py::handle x) {
  const py::module_ numpy = py::module_::import("numpy");
  if (PyObject_CheckBuffer(x.ptr()) != 0)
    return numpy.attr("asarray")(py::memoryview(py::reinterpret_borrow<py::object>(x)));
  return numpy.attr("from_dlpack")(x);
}

}  // namespace

py::object new_array(py::handle x, int64_t num_rows) {
  if (py::isinstance<py::array>(x)) {
    const auto like = py::reinterpret_borrow<py::array>(x);
    std::vector<py::ssize_t> shape(like.shape(), like.shape() + like.ndim());
    if (shape.empty()) shape.resize(1);
    shape[0] = num_rows;
    return py::array(like.dtype(), std::move(shape));
  }
  if (py::hasattr(x, "new_empty")) {
    py::list shape(x.attr("shape"));
    if (shape.empty()) shape.append(0);
    shape[0] = num_rows;
    return x.attr("new_empty")(py::tuple(shape));
  }
  if (py::hasattr(x, "__cuda_array_interface__")) {
    return py::module_::import("pycoll.arrays.device").attr("new_like")(x, num_rows);
  }
  try {
    return new_array(numpy_view(x), num_rows);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    throw UsageError("cannot make a result array like x, a " +
                     std::string(Py_TYPE(x.ptr())->tp_name) + ": pass a result array as out=");
  }
}

}  // namespace pycoll
