// Arrays of any library as a pointer, a count and a dtype, without a copy.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "reduce/dtypes.h"

struct DLManagedTensor;
struct DLTensor;

namespace pycoll {

/// A borrowed view of a contiguous host array; keeps its exporter's memory alive while it lives.
class ArrayView {
 public:
  /// NumPy arrays, the buffer protocol, then DLPack. `what` names the argument in messages.
  /// Raises UsageError when `object` is none of these, is not contiguous, is not in host memory,
  /// has a dtype that pycoll lacks, or is read-only while `writable`.
  ArrayView(PyObject* object, const char* what, bool writable);

  void* data = nullptr;
  int64_t count = 1;  // elements
  DType dtype = DType::kF32;
  int num_dims = 0;
  int64_t shape[6] = {};

 private:
  bool view_numpy(PyObject* object, const char* what, bool writable);
  bool view_buffer(PyObject* object, const char* what, bool writable);
  bool view_dlpack_table(PyObject* object, const char* what);
  bool view_dlpack(PyObject* object, const char* what);
  void set_tensor(const char* what, pybind11::handle object, const DLTensor& tensor);
  void set_shape(const char* what, int num_dims, const int64_t* dims);

  struct Release {
    void operator()(Py_buffer* buffer) const;
    void operator()(DLManagedTensor* tensor) const;
  };
  pybind11::object object_;  // of a view that its exporter does not count
  std::unique_ptr<Py_buffer, Release> buffer_;
  std::unique_ptr<DLManagedTensor, Release> dlpack_;
};

}  // namespace pycoll
