#include "bindings/errors.h"

#include <new>
#include <string_view>
#include <system_error>

#include "base/error.h"

namespace pycoll {
namespace py = pybind11;

namespace {

/// The error's text; it may contain bytes from outside, such as an environment variable's.
py::object decoded(const std::exception& error) {
  const std::string_view text = error.what();
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

void set_error(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("pycoll.errors").attr(name);
  PyErr_SetObject(type.ptr(), decoded(error).ptr());
}

}  // namespace

namespace {

void translate(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerDiedError& e) {
    const py::object type = py::module_::import("pycoll.errors").attr("PeerDiedError");
    const py::object value =
        type(decoded(e), py::arg("rank") = e.rank(), py::arg("signal") = e.signal());
    PyErr_SetObject(type.ptr(), value.ptr());
  } catch (const CollectiveMismatchError& e) {
    set_error("CollectiveMismatchError", e);
  } catch (const TimeoutError& e) {
    set_error("TimeoutError", e);
  } catch (const AbortedError& e) {
    set_error("AbortedError", e);
  } catch (const UsageError& e) {
    set_error("UsageError", e);
  } catch (const SystemError& e) {
    set_error("SystemError", e);
  } catch (const CudaError& e) {
    set_error("CudaError", e);
  } catch (const MpiError& e) {
    set_error("MpiError", e);
  } catch (const DataError& e) {
    set_error("DataError", e);
  } catch (const Error& e) {
    set_error("Error", e);
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "pycoll: the system has no memory left");
  } catch (const std::system_error& e) {
    set_error("SystemError", e);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

}  // namespace

void set_python_error(std::exception_ptr error) {
  // A signal handler's error (Ctrl-C) takes precedence over the errors that it caused.
  if (PyErr_Occurred() != nullptr) return;
  try {
    translate(error);
  } catch (const py::error_already_set&) {
    // While the interpreter ends, pycoll.errors cannot be imported any more.
    PyErr_SetString(PyExc_RuntimeError, "pycoll failed while the interpreter was ending");
  }
}

void register_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (!error) return;
    try {
      std::rethrow_exception(error);
    } catch (const Error&) {
      set_python_error(error);
    } catch (const std::bad_alloc&) {
      set_python_error(error);
    } catch (const std::system_error&) {
      set_python_error(error);
    }
  });
}

}  // namespace pycoll
