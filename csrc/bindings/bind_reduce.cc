// reduce_copy and copy_bytes on Python's buffers, for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/bind.h"
#include "reduce/reduce_copy.h"

namespace py = pybind11;

namespace pycoll {
namespace {

/// The bytes of a one-dimensional contiguous buffer; the view keeps it alive.
py::buffer_info bytes_of(const py::buffer& buffer, bool writable) {
  py::buffer_info info = buffer.request(writable);
  if (info.ndim != 1 || info.strides[0] != info.itemsize) {
    throw UsageError("reduce_copy: expected a contiguous buffer of one dimension, got " +
                     std::to_string(info.ndim) + " dimensions or a stride");
  }
  return info;
}

size_t nbytes_of(const py::buffer_info& info) {
  return static_cast<size_t>(info.size) * static_cast<size_t>(info.itemsize);
}

void reduce_copy(const std::vector<py::buffer>& srcs, const std::vector<py::buffer>& dsts,
                 const std::string& dtype_text, const std::string& op_text, int64_t divisor,
                 bool streaming) {
  const auto dtype = find_dtype(dtype_text);
  const auto op = find_op(op_text);
  if (!dtype || !op || srcs.empty() || dsts.empty() || divisor < 1) {
    throw UsageError("reduce_copy: expected sources, destinations, a known dtype and op and a " +
                     std::string("positive divisor, got ") + std::to_string(srcs.size()) + ", " +
                     std::to_string(dsts.size()) + ", " + dtype_text + ", " + op_text + ", " +
                     std::to_string(divisor));
  }
  std::vector<py::buffer_info> views;
  for (const py::buffer& src : srcs) views.push_back(bytes_of(src, false));
  for (const py::buffer& dst : dsts) views.push_back(bytes_of(dst, true));
  std::vector<void*> operands;
  const size_t nbytes = nbytes_of(views[0]);
  for (const py::buffer_info& view : views) {
    if (nbytes_of(view) != nbytes || nbytes % dtype_size(*dtype) != 0) {
      throw UsageError("reduce_copy: expected operands of one size, whole elements of " +
                       dtype_text + ", got " + std::to_string(nbytes) + " and " +
                       std::to_string(nbytes_of(view)) + " bytes");
    }
    operands.push_back(view.ptr);
  }
  reduce_copy_fn(*dtype, *op)({operands.data(), static_cast<int>(srcs.size()),
                               operands.data() + srcs.size(), static_cast<int>(dsts.size()),
                               nbytes / dtype_size(*dtype), divisor, streaming});
}

template <class Row>
py::list names(int num_rows, std::string_view (*name)(Row)) {
  py::list all;
  for (int i = 0; i < num_rows; ++i) all.append(std::string(name(static_cast<Row>(i))));
  return all;
}

}  // namespace

void bind_reduce(py::module_& m) {
  m.def("reduce_copy_isa", &reduce_copy_isa,
        "The instruction set in use: avx512, avx2 or generic.");
  m.def("_reduce_dtypes", [] { return names<DType>(kNumDTypes, dtype_name); });
  m.def("_reduce_ops", [] { return names<Op>(kNumOps, op_name); });
  m.def("_reduce_copy", &reduce_copy, py::arg("srcs"), py::arg("dsts"), py::arg("dtype"),
        py::arg("op"), py::arg("divisor") = 1, py::arg("streaming") = false,
        "dsts <- reduce(srcs), all contiguous buffers of one size, read as elements of dtype.");
  m.def(
      "_copy_bytes",
      [](const py::buffer& dst, const py::buffer& src, bool streaming) {
        const py::buffer_info to = bytes_of(dst, true);
        const py::buffer_info from = bytes_of(src, false);
        if (nbytes_of(to) != nbytes_of(from)) {
          throw UsageError("copy_bytes: expected " + std::to_string(nbytes_of(to)) +
                           " bytes, as many as the destination has, got " +
                           std::to_string(nbytes_of(from)));
        }
        copy_bytes(to.ptr, from.ptr, nbytes_of(to), streaming);
      },
      py::arg("dst"), py::arg("src"), py::arg("streaming") = false, "dst <- src, byte for byte.");
}

}  // namespace pycoll
