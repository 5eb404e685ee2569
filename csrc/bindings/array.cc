#include "bindings/array.h"

#include <pybind11/numpy.h>

#include <string>

#include "base/error.h"
#include "bindings/dlpack.h"

namespace pycoll {
namespace py = pybind11;

namespace {

enum class Kind : char { kFloat = 'f', kBrainFloat = 'b', kInt = 'i', kUInt = 'u', kOther = '?' };

struct DTypeRow {
  DType dtype;
  Kind kind;
  size_t size;
};

// How array libraries describe each dtype.
constexpr DTypeRow kRows[] = {
    {DType::kF32, Kind::kFloat, 4}, {DType::kF64, Kind::kFloat, 8},
    {DType::kF16, Kind::kFloat, 2}, {DType::kBF16, Kind::kBrainFloat, 2},
    {DType::kI32, Kind::kInt, 4},   {DType::kI64, Kind::kInt, 8},
    {DType::kU8, Kind::kUInt, 1},
};
static_assert(sizeof(kRows) / sizeof(kRows[0]) == kNumDTypes);

const DType* find_dtype(Kind kind, size_t size) {
  for (const DTypeRow& row : kRows) {
    if (row.kind == kind && row.size == size) return &row.dtype;
  }
  return nullptr;
}

[[noreturn]] void refuse(const char* what, const std::string& why) {
  throw UsageError(std::string(what) + " " + why);
}

[[noreturn]] void refuse_dtype(const char* what, const std::string& spelled) {
  std::string known;
  for (const DTypeRow& row : kRows) {
    known += (known.empty() ? "" : ", ") + std::string(dtype_name(row.dtype));
  }
  refuse(what, "has dtype " + spelled + ", which pycoll cannot reduce: expected one of " + known);
}

constexpr const char* kNotContiguous =
    "is not contiguous: pass a contiguous copy (numpy.ascontiguousarray(x), x.contiguous())";
constexpr const char* kReadOnly = "is read-only: pass a writable array, or a result array as out=";

/// The exporter of a DLPack view said no: its reason, as ours. Ctrl-C stays what it is.
[[noreturn]] void refuse_dlpack(const char* what, py::handle object, py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw error;
  const auto reason = py::str(error.value()).cast<std::string>();
  refuse(what,
         "is a " + std::string(Py_TYPE(object.ptr())->tp_name) +
             " that cannot be passed on through DLPack: " + reason.substr(0, reason.find('\n')));
}

Kind kind_of_format(char format) {
  switch (format) {
    case 'e':
    case 'f':
    case 'd':
      return Kind::kFloat;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n':
      return Kind::kInt;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N':
      return Kind::kUInt;
    default:
      return Kind::kOther;
  }
}

const DType* dtype_of_numpy(int type_num) {
  using api = py::detail::npy_api;
  switch (type_num) {
    case api::NPY_FLOAT_:
      return find_dtype(Kind::kFloat, 4);
    case api::NPY_DOUBLE_:
      return find_dtype(Kind::kFloat, 8);
    case 23:  // NPY_HALF
      return find_dtype(Kind::kFloat, 2);
    case api::NPY_INT_:
      return find_dtype(Kind::kInt, sizeof(int));
    case api::NPY_LONG_:
      return find_dtype(Kind::kInt, sizeof(long));
    case api::NPY_LONGLONG_:
      return find_dtype(Kind::kInt, sizeof(long long));
    case api::NPY_UBYTE_:
      return find_dtype(Kind::kUInt, 1);
    default:
      return nullptr;
  }
}

}  // namespace

ArrayView::ArrayView(PyObject* object, const char* what, bool writable) {
  if (view_numpy(object, what, writable) || view_buffer(object, what, writable) ||
      view_dlpack_table(object, what) || view_dlpack(object, what)) {
    return;
  }
  refuse(what, "is a " + std::string(Py_TYPE(object)->tp_name) +
                   ": expected an array with the buffer protocol or DLPack (NumPy, torch, ...)");
}

void ArrayView::Release::operator()(Py_buffer* buffer) const {
  PyBuffer_Release(buffer);
  delete buffer;
}

void ArrayView::Release::operator()(DLManagedTensor* tensor) const {
  if (tensor->deleter != nullptr) tensor->deleter(tensor);
}

void ArrayView::set_shape(const char* what, int num_dims_in, const int64_t* dims) {
  if (num_dims_in > 64) refuse(what, "has more than 64 dimensions");
  // Records keep six dimensions; the rest are folded into the sixth.
  num_dims = num_dims_in < 6 ? num_dims_in : 6;
  for (int i = 0; i < num_dims_in; ++i) {
    count *= dims[i];
    if (i < 6) {
      shape[i] = dims[i];
    } else {
      shape[5] *= dims[i];
    }
  }
}

bool ArrayView::view_numpy(PyObject* object, const char* what, bool writable) {
  // Field by field: this is on the path of a four-byte message, where py::array's conveniences cost
  // more than the message.
  if (!py::detail::npy_api::get().PyArray_Check_(object)) return false;
  const auto* array = py::detail::array_proxy(object);
  const auto* descr = py::detail::array_descriptor1_proxy(array->descr);
  if (descr->byteorder == '>') refuse(what, "is big-endian: pass a copy in native byte order");
  const DType* found = dtype_of_numpy(descr->type_num);
  if (found == nullptr) refuse_dtype(what, py::str(py::handle(array->descr)).cast<std::string>());
  if ((array->flags & py::array::c_style) == 0) refuse(what, kNotContiguous);
  if (writable && (array->flags & py::detail::npy_api::NPY_ARRAY_WRITEABLE_) == 0) {
    refuse(what, kReadOnly);
  }
  object_ = py::reinterpret_borrow<py::object>(object);
  dtype = *found;
  data = array->data;
  static_assert(sizeof(*array->dimensions) == sizeof(int64_t));
  set_shape(what, array->nd, reinterpret_cast<const int64_t*>(array->dimensions));
  return true;
}

bool ArrayView::view_buffer(PyObject* object, const char* what, bool writable) {
  if (!PyObject_CheckBuffer(object)) return false;
  auto view = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object, view.get(), PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
    PyErr_Clear();
    return false;
  }
  buffer_.reset(view.release());
  if (!PyBuffer_IsContiguous(buffer_.get(), 'C')) refuse(what, kNotContiguous);
  if (writable && buffer_->readonly != 0) refuse(what, kReadOnly);
  const std::string format = buffer_->format == nullptr ? "B" : buffer_->format;
  const bool native =
      format.size() == 1 ||
      (format.size() == 2 && (format[0] == '@' || format[0] == '=' || format[0] == '<'));
  const DType* found = find_dtype(native ? kind_of_format(format.back()) : Kind::kOther,
                                  static_cast<size_t>(buffer_->itemsize));
  if (found == nullptr) refuse_dtype(what, "'" + format + "'");
  dtype = *found;
  data = buffer_->buf;
  set_shape(what, buffer_->ndim, reinterpret_cast<const int64_t*>(buffer_->shape));
  return true;
}

void ArrayView::set_tensor(const char* what, py::handle object, const DLTensor& tensor) {
  constexpr int32_t kHost = 1;
  constexpr int32_t kPinnedHost = 3;
  if (tensor.device.device_type != kHost && tensor.device.device_type != kPinnedHost) {
    refuse(what, "is not in host memory: this build of pycoll reduces host arrays only");
  }
  int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0 && tensor.strides != nullptr; --i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != expected) refuse(what, kNotContiguous);
    expected *= tensor.shape[i];
  }
  constexpr Kind kKinds[] = {Kind::kInt, Kind::kUInt, Kind::kFloat, Kind::kOther,
                             Kind::kBrainFloat};
  const bool known = tensor.dtype.code < std::size(kKinds) && tensor.dtype.lanes == 1;
  const DType* found =
      find_dtype(known ? kKinds[tensor.dtype.code] : Kind::kOther, tensor.dtype.bits / 8u);
  if (found == nullptr) refuse_dtype(what, py::str(object.attr("dtype")).cast<std::string>());
  dtype = *found;
  data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  set_shape(what, tensor.ndim, tensor.shape);
}

bool ArrayView::view_dlpack_table(PyObject* object, const char* what) {
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  const auto capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none()) return false;
  const auto* table = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) throw py::error_already_set();
  if (table->header.major != 1 || table->tensor_from_object == nullptr) return false;
  DLTensor tensor{};
  if (table->tensor_from_object(object, &tensor) != 0) {
    py::error_already_set error;
    refuse_dlpack(what, object, error);
  }
  object_ = py::reinterpret_borrow<py::object>(object);
  set_tensor(what, object, tensor);
  return true;
}

bool ArrayView::view_dlpack(PyObject* object, const char* what) {
  const py::handle handle(object);
  if (PyType_Check(object) || !py::hasattr(handle, "__dlpack__")) return false;
  py::object capsule;
  try {
    capsule = handle.attr("__dlpack__")();
  } catch (py::error_already_set& error) {
    refuse_dlpack(what, handle, error);
  }
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  dlpack_.reset(managed);
  set_tensor(what, handle, managed->dl_tensor);
  return true;
}

}  // namespace pycoll
