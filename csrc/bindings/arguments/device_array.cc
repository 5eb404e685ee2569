// Device arrays: DLPack tensors and __cuda_array_interface__, with the current stream of their
// library. A library is queried only if it is already imported.
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/arguments/array.h"
#include "bindings/arguments/array_dtypes.h"
#include "bindings/arguments/dlpack.h"
#include "device/device_library.h"

namespace pycoll {
namespace py = pybind11;

namespace {

void* stream_from(const py::handle& number) {
  return reinterpret_cast<void*>(number.cast<uintptr_t>());
}

/// The package that defines the object's type, if it is imported; null where it is not.
py::object package_of(PyObject* object, const char* name) {
  const auto module = py::handle(reinterpret_cast<PyObject*>(Py_TYPE(object)))
                          .attr("__module__")
                          .cast<std::string>();
  if (!module.starts_with(name)) return {};
  PyObject* found = PyImport_GetModule(py::str(name).ptr());
  return py::reinterpret_steal<py::object>(found);
}

/// The current stream of the array's library.
void* current_stream(PyObject* object, int device, const py::dict& interface) {
  if (const py::object torch = package_of(object, "torch")) {
    return stream_from(torch.attr("cuda").attr("current_stream")(device).attr("cuda_stream"));
  }
  if (const py::object cupy = package_of(object, "cupy")) {
    return stream_from(cupy.attr("cuda").attr("get_current_stream")().attr("ptr"));
  }
  // Version 3 of the interface: a stream on which the array is ready. Other versions: the default.
  if (!interface.contains("stream")) return nullptr;
  const py::object stream = interface["stream"];
  return stream.is_none() ? nullptr : stream_from(stream);
}

DType dtype_of_typestr(const std::string& typestr, const py::dict& interface) {
  const size_t size = std::stoul(typestr.substr(2));
  const bool is_native = typestr[0] == '|' || size == 1 ||
                         typestr[0] == (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '<' : '>');
  if (!is_native) return DType::kOpaque;
  switch (typestr[1]) {
    case 'f':
      if (size > 1) return dtype_of(DTypeKind::kFloat, size);
      break;
    case 'i':
      return dtype_of(DTypeKind::kInt, size);
    case 'u':
      return dtype_of(DTypeKind::kUInt, size);
    case 'b':
      return dtype_of(DTypeKind::kBool, size);
    case 'c':
      return dtype_of(DTypeKind::kComplex, size);
    default:
      break;
  }
  // NumPy has no type string for 16-bit brain floats and 8-bit floats: bytes, and a field's name.
  if (!interface.contains("descr")) return DType::kOpaque;
  const py::list fields(interface["descr"]);
  if (fields.size() != 1) return DType::kOpaque;
  const auto name = py::str(py::tuple(fields[0])[0]).cast<std::string>();
  const std::optional<DType> found = find_dtype(name);
  return found && dtype_size(*found) == size ? *found : DType::kOpaque;
}

}  // namespace

bool ArrayView::view_cuda_interface(PyObject* object, const char* what, bool writable) {
  const py::handle handle(object);
  if (PyType_Check(object) || !py::hasattr(handle, "__cuda_array_interface__")) return false;
  const auto refuse = [&](const std::string& why) {
    throw UsageError(std::string(what) + " has a __cuda_array_interface__ that cannot be read: " +
                     why.substr(0, why.find('\n')));
  };
  try {
    read_cuda_interface(object, what, writable);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    refuse(error.what());
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // of pybind11's casts and of std::stoul
    refuse(error.what());
  }
  return true;
}

void ArrayView::read_cuda_interface(PyObject* object, const char* what, bool writable) {
  const py::dict interface(py::handle(object).attr("__cuda_array_interface__"));
  const py::tuple where(interface["data"]);
  data = reinterpret_cast<void*>(where[0].cast<uintptr_t>());
  if (writable && where[1].cast<bool>()) {
    throw UsageError(std::string(what) + " is read-only: pass a writable array");
  }
  const auto typestr = interface["typestr"].cast<std::string>();
  const DType found = dtype_of_typestr(typestr, interface);
  if (found != DType::kOpaque) {
    set_dtype(found);
  } else {
    set_opaque(what, py::str("'" + typestr + "'"), std::stoul(typestr.substr(2)));
  }
  std::vector<int64_t> dims;
  auto nbytes = static_cast<int64_t>(element_size);
  for (const py::handle dim : py::tuple(interface["shape"])) {
    dims.push_back(dim.cast<int64_t>());
    if (dims.back() < 0 || __builtin_mul_overflow(nbytes, dims.back(), &nbytes)) {
      throw UsageError(std::string(what) + " has an invalid shape in its __cuda_array_interface__");
    }
  }
  if (interface.contains("strides") && !interface["strides"].is_none()) {
    const py::tuple strides(interface["strides"]);
    if (strides.size() != dims.size()) refuse_not_contiguous(what);
    auto expected = static_cast<int64_t>(element_size);
    for (size_t i = dims.size(); i-- > 0;) {
      if (dims[i] > 1 && strides[i].cast<int64_t>() != expected) refuse_not_contiguous(what);
      expected *= dims[i];
    }
  }
  set_shape(what, static_cast<int>(dims.size()), dims.data());
  object_ = py::reinterpret_borrow<py::object>(object);
  int32_t index = -1;
  if (count != 0) {
    const DeviceTable& table = device_table();
    if (table.find_device(data, &index) != 0) throw CudaError(table.last_error());
    if (index < 0) {
      throw UsageError(std::string(what) + " is not in memory of a device of " + table.name);
    }
  } else {
    index = 0;  // an empty array has no memory: any device is right
  }
  set_device(what, index, current_stream(object, index, interface));
}

void ArrayView::set_device(const char* what, int device_in, void* stream_in) {
  if (!allows_device_) {
    throw UsageError(std::string(what) +
                     " is in device memory, expected CPU memory: copy the array to the CPU");
  }
  device = device_in;
  stream = stream_in;
}

}  // namespace pycoll
