#include "bindings/arguments/array.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "base/error.h"
#include "bindings/arguments/arguments.h"
#include "bindings/arguments/array_dtypes.h"
#include "device/device_library.h"
#include "transport/ring/records.h"

namespace pycoll {
namespace py = pybind11;

namespace {

[[noreturn]] void refuse(const char* what, const std::string& why) {
  throw UsageError(std::string(what) + " " + why);
}

constexpr const char* kNotContiguous =
    "is not contiguous: pass a contiguous copy (numpy.ascontiguousarray(x), x.contiguous())";
constexpr const char* kReadOnly = "is read-only: pass a writable array, or a result array as out=";

/// Raises UsageError with the reason why the exporter refused a DLPack view. Ctrl-C is passed on.
[[noreturn]] void refuse_dlpack(const char* what, py::handle object, py::error_already_set& error) {
  if (!error.matches(PyExc_Exception)) throw error;
  const auto reason = py::str(error.value()).cast<std::string>();
  // A dtype without a DLPack type can still be viewed as bytes and copied.
  const bool about_dtype = reason.find("type") != reason.npos;
  refuse(what,
         "is a " + std::string(Py_TYPE(object.ptr())->tp_name) +
             " that cannot be passed on through DLPack: " + reason.substr(0, reason.find('\n')) +
             (about_dtype ? " (pass its bytes: x.view(torch.uint8))" : ""));
}

/// Whether a buffer's format has 'O' (a Python object), not counting field names (":name:").
bool has_objects(std::string_view format) {
  bool in_name = false;
  for (const char c : format) {
    if (c == ':') in_name = !in_name;
    if (c == 'O' && !in_name) return true;
  }
  return false;
}

/// Whether the device that a package adds to torch is that of the device library: only the emulated
/// device is such a one.
bool extension_is_known() {
  std::string note;
  const DeviceTable* const table = find_device_table(note);
  return table != nullptr && std::string_view(table->name) != "cuda";
}

/// Refuses a description that no library makes, before its numbers are used.
void check_tensor(const char* what, const DLTensor& tensor) {
  const bool has_shape = tensor.shape != nullptr || tensor.ndim == 0;
  bool valid = tensor.ndim >= 0 && tensor.ndim <= 64 && has_shape;
  auto nbytes = static_cast<int64_t>(size_of_dlpack(tensor.dtype));
  for (int i = 0; valid && i < tensor.ndim; ++i) {
    valid = tensor.shape[i] >= 0 && !__builtin_mul_overflow(nbytes, tensor.shape[i], &nbytes);
  }
  if (!valid || (nbytes != 0 && tensor.data == nullptr)) {
    refuse(what, "has a DLPack description with an invalid shape or address");
  }
}

}  // namespace

PyObject* numpy_owner(PyObject* array) {
  constexpr int kOwnsData = 0x4;  // NPY_ARRAY_OWNDATA
  const auto& numpy = py::detail::npy_api::get();
  while (py::detail::array_proxy(array)->base != nullptr) {
    array = py::detail::array_proxy(array)->base;
    if (!numpy.PyArray_Check_(array)) return nullptr;
  }
  return (py::detail::array_proxy(array)->flags & kOwnsData) != 0 ? array : nullptr;
}

ArrayView::ArrayView(PyObject* object, const char* what, bool writable, Memory memory)
    : allows_device_(memory == Memory::kHostOrDevice) {
  if (view_numpy(object, what, writable) || view_buffer(object, what, writable) ||
      view_dlpack_table(object, what) || view_cuda_interface(object, what, writable) ||
      view_dlpack(object, what)) {
    return;
  }
  refuse(what, "is a " + type_of(object) +
                   ": expected an array with the buffer protocol or DLPack (NumPy, torch, ...)");
}

py::object ArrayView::pin() const {
  PyObject* const owner = is_numpy_ ? numpy_owner(object_.ptr()) : nullptr;
  if (owner == nullptr) return {};
  auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(owner, nullptr));
  if (!reference) PyErr_Clear();  // a subclass without weak references
  return reference;
}

void ArrayView::refuse_not_contiguous(const char* what) { refuse(what, kNotContiguous); }

void ArrayView::Release::operator()(Py_buffer* buffer) const {
  PyBuffer_Release(buffer);
  delete buffer;
}

void ArrayView::Release::operator()(DLManagedTensor* tensor) const {
  if (tensor->deleter != nullptr) tensor->deleter(tensor);
}

std::string ArrayView::dtype_text() const {
  if (dtype != DType::kOpaque) return std::string(dtype_name(dtype));
  return py::str(described_).cast<std::string>();
}

void ArrayView::refuse_reduction(const char* what, Op op) const {
  if (dtype != DType::kOpaque) check_op(dtype, op);
  const std::string text = dtype_text();
  // The byte order as NumPy and the struct module spell it.
  const bool is_big_endian = text.starts_with('>') || text.starts_with("'>");
  refuse(what, "has dtype " + text + (is_big_endian ? " (big-endian)" : "") +
                   ", which pycoll can copy but not reduce: expected one of " + dtype_names() +
                   (is_big_endian ? " in native byte order" : ""));
}

void ArrayView::set_opaque(const char* what, py::object described, size_t size) {
  dtype = DType::kOpaque;
  element_size = size;
  described_ = std::move(described);
  const std::string text = dtype_text();
  if (size == 0) refuse(what, "has dtype " + text + ", whose elements have no bytes");
  // torch names a dtype as NumPy's packages do, so that their arrays may meet in one call.
  constexpr std::string_view kTorch = "torch.";
  const std::string_view name = text;
  dtype_hash = hash_text(name.starts_with(kTorch) ? name.substr(kTorch.size()) : name);
}

void ArrayView::set_shape(const char* what, int num_dims_in, const int64_t* dims) {
  if (num_dims_in > 64) refuse(what, "has more than 64 dimensions");
  // Records keep six dimensions; the sixth is the product of the remaining ones.
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
  DType found = dtype_of_numpy(descr->type_num);
  if (found == DType::kOpaque) {
    found = dtype_of_scalar_type(reinterpret_cast<PyTypeObject*>(descr->typeobj)->tp_name);
  }
  if (found == DType::kOpaque || descr->byteorder == '>') {
    const auto described = py::reinterpret_borrow<py::object>(array->descr);
    if (described.attr("hasobject").cast<bool>()) {
      refuse(what, "has dtype " + py::str(described).cast<std::string>() +
                       ", whose elements are references into this process");
    }
    set_opaque(what, described, described.attr("itemsize").cast<size_t>());
  } else {
    set_dtype(found);
  }
  if ((array->flags & py::array::c_style) == 0) refuse(what, kNotContiguous);
  if (writable && (array->flags & py::detail::npy_api::NPY_ARRAY_WRITEABLE_) == 0) {
    refuse(what, kReadOnly);
  }
  object_ = py::reinterpret_borrow<py::object>(object);
  is_numpy_ = true;
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
  const auto size = static_cast<size_t>(buffer_->itemsize);
  const DType found = dtype_of_format(format, size);
  if (found != DType::kOpaque) {
    set_dtype(found);
  } else if (has_objects(format)) {
    refuse(what, "has elements of format '" + format + "': references into this process");
  } else {
    set_opaque(what, py::str("'" + format + "'"), size);
  }
  data = buffer_->buf;
  set_shape(what, buffer_->ndim, reinterpret_cast<const int64_t*>(buffer_->shape));
  return true;
}

void ArrayView::set_tensor(const char* what, py::handle object, const DLTensor& tensor,
                           const DLPackExchangeAPI* table) {
  constexpr int32_t kHost = 1;
  constexpr int32_t kCuda = 2;
  constexpr int32_t kPinnedHost = 3;
  constexpr int32_t kExtension = 12;  // a device that another package adds to torch
  constexpr int32_t kManagedByCuda = 13;
  check_tensor(what, tensor);
  const int32_t where = tensor.device.device_type;
  const bool is_cuda = where == kCuda || where == kManagedByCuda;
  if (is_cuda || (where == kExtension && table != nullptr && extension_is_known())) {
    void* current = nullptr;
    const int32_t type = is_cuda ? kCuda : kExtension;
    if (table != nullptr && table->current_stream(type, tensor.device.device_id, &current) != 0) {
      throw py::error_already_set();
    }
    set_device(what, tensor.device.device_id, current);
  } else if (where != kHost && where != kPinnedHost) {
    refuse(what, "is neither in CPU memory nor in that of a CUDA device");
  }
  // Strides of an empty tensor have no meaning.
  const bool has_elements = std::count(tensor.shape, tensor.shape + tensor.ndim, 0) == 0;
  int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0 && tensor.strides != nullptr && has_elements; --i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != expected) refuse(what, kNotContiguous);
    expected *= tensor.shape[i];
  }
  const DType found = dtype_of_dlpack(tensor.dtype);
  if (found == DType::kOpaque) {
    set_opaque(what, object.attr("dtype"), size_of_dlpack(tensor.dtype));
  } else {
    set_dtype(found);
  }
  data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  set_shape(what, tensor.ndim, tensor.shape);
}

bool ArrayView::view_dlpack_table(PyObject* object, const char* what) {
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  const auto capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none()) return false;
  const auto* table = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) {
    PyErr_Clear();
    return false;
  }
  if (table->header.major != 1 || table->tensor_from_object == nullptr) return false;
  DLTensor tensor{};
  if (table->tensor_from_object(object, &tensor) != 0) {
    py::error_already_set error;
    refuse_dlpack(what, object, error);
  }
  object_ = py::reinterpret_borrow<py::object>(object);
  set_tensor(what, object, tensor, table);
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
  if (managed == nullptr) {
    PyErr_Clear();
    refuse(what, "is a " + type_of(object) + " whose __dlpack__() returned no new DLPack capsule");
  }
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  dlpack_.reset(managed);
  set_tensor(what, handle, managed->dl_tensor, nullptr);
  return true;
}

}  // namespace pycoll
