// Arrays of any library as a pointer, a count and a dtype, without a copy.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "reduce/cells.h"

struct DLManagedTensor;
struct DLTensor;
struct DLPackExchangeAPI;

namespace pycoll {

/// The NumPy array that owns the memory of `array`; null when the owner is no NumPy array.
PyObject* numpy_owner(PyObject* array);

/// Memory that an argument may be in.
enum class Memory : uint8_t { kHost, kHostOrDevice };

/// A view of a contiguous host or device array; keeps the exporter's memory alive while the view
/// lives. Elements may be of any type of fixed size. A type that is not in the dtype table is
/// kOpaque: it can be copied, but not reduced.
class ArrayView {
 public:
  /// Tries NumPy arrays, the buffer protocol, DLPack, then __cuda_array_interface__. `what` names
  /// the argument in messages.
  /// Raises UsageError when `object` supports none of these, is not contiguous, is not in `memory`,
  /// holds Python objects, is read-only although `writable` is set, or is a device array and
  /// pycoll's device library is not available.
  ArrayView(PyObject* object, const char* what, bool writable, Memory memory = Memory::kHost);

  void* data = nullptr;
  int64_t count = 1;  // elements
  DType dtype = DType::kOpaque;
  size_t element_size = 0;  // bytes, of opaque elements too
  uint32_t dtype_hash = 0;  // of the name of an opaque dtype
  int num_dims = 0;
  int64_t shape[6] = {};
  int device = -1;         // number of the device; -1: CPU memory
  void* stream = nullptr;  // current stream of the array's library on that device

  /// While the returned object lives, NumPy refuses to resize the array: for an operation that goes
  /// on after the call.
  pybind11::object pin() const;
  /// The viewed NumPy array; null for arrays of other libraries.
  PyObject* numpy() const { return is_numpy_ ? object_.ptr() : nullptr; }
  int64_t nbytes() const { return count * static_cast<int64_t>(element_size); }
  /// Name of the dtype in the core ("f32"), or in its library if it is opaque ("datetime64[ns]").
  std::string dtype_text() const;
  bool same_elements(const ArrayView& other) const {
    return dtype == other.dtype && element_size == other.element_size &&
           dtype_hash == other.dtype_hash;
  }
  /// Raises UsageError with the reason when the elements cannot be reduced with `op`.
  void check_reducible(const char* what, Op op) const {
    if (!supported(dtype, op)) refuse_reduction(what, op);
  }

 private:
  bool view_numpy(PyObject* object, const char* what, bool writable);
  bool view_buffer(PyObject* object, const char* what, bool writable);
  bool view_dlpack_table(PyObject* object, const char* what);
  bool view_dlpack(PyObject* object, const char* what);
  bool view_cuda_interface(PyObject* object, const char* what, bool writable);
  void read_cuda_interface(PyObject* object, const char* what, bool writable);
  void set_device(const char* what, int device, void* stream);
  [[noreturn]] static void refuse_not_contiguous(const char* what);
  void set_dtype(DType found) {
    dtype = found;
    element_size = dtype_size(found);
  }
  void set_opaque(const char* what, pybind11::object described, size_t size);
  void set_tensor(const char* what, pybind11::handle object, const DLTensor& tensor,
                  const DLPackExchangeAPI* table);
  void set_shape(const char* what, int num_dims, const int64_t* dims);
  [[noreturn]] void refuse_reduction(const char* what, Op op) const;

  struct Release {
    void operator()(Py_buffer* buffer) const;
    void operator()(DLManagedTensor* tensor) const;
  };
  bool is_numpy_ = false;
  bool allows_device_ = false;
  pybind11::object object_;     // keeps the exporter of an uncounted view alive
  pybind11::object described_;  // the library's dtype object of opaque elements
  std::unique_ptr<Py_buffer, Release> buffer_;
  std::unique_ptr<DLManagedTensor, Release> dlpack_;
};

}  // namespace pycoll
