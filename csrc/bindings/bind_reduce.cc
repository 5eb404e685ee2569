// reduce_copy and copy_bytes on Python's buffers, for the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/arguments/arguments.h"
#include "bindings/bind.h"
#include "reduce/cells.h"
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

DType dtype_from_name(const std::string& name) {
  if (const auto dtype = find_dtype(name)) return *dtype;
  throw UsageError("unknown dtype '" + name + "': expected one of " + dtype_names());
}

void reduce_copy(const std::vector<py::buffer>& srcs, const std::vector<py::buffer>& dsts,
                 const std::string& dtype_text, const std::string& op_text, int64_t divisor,
                 int num_streaming, std::optional<int> first_to_peer, bool past_caches) {
  const DType dtype = dtype_from_name(dtype_text);
  const Op op = op_from_name(op_text);
  if (srcs.empty() || dsts.empty() || divisor < 1) {
    throw UsageError("reduce_copy: expected sources, destinations and a positive divisor, got " +
                     std::to_string(srcs.size()) + ", " + std::to_string(dsts.size()) + ", " +
                     std::to_string(divisor));
  }
  std::vector<py::buffer_info> views;
  for (const py::buffer& src : srcs) views.push_back(bytes_of(src, false));
  for (const py::buffer& dst : dsts) views.push_back(bytes_of(dst, true));
  std::vector<void*> operands;
  const size_t nbytes = nbytes_of(views[0]);
  for (const py::buffer_info& view : views) {
    if (nbytes_of(view) != nbytes || nbytes % dtype_size(dtype) != 0) {
      throw UsageError("reduce_copy: expected operands of one size, whole elements of " +
                       dtype_text + ", got " + std::to_string(nbytes) + " and " +
                       std::to_string(nbytes_of(view)) + " bytes");
    }
    operands.push_back(view.ptr);
  }
  const auto num_dsts = static_cast<int>(dsts.size());
  PeerStores stores(past_caches ? PeerStores::Way::kPastCaches : PeerStores::Way::kCached);
  const std::vector<PeerStores*> stores_of_peers(dsts.size(), &stores);
  reduce_copy_fn(dtype,
                 op)({operands.data(), static_cast<int>(srcs.size()), operands.data() + srcs.size(),
                      num_dsts, nbytes / dtype_size(dtype), divisor, num_streaming,
                      first_to_peer.value_or(num_dsts), stores_of_peers.data()});
}

/// dst <- src * factor.
void scale(const py::buffer& dst, const py::buffer& src, const std::string& dtype_text,
           double factor) {
  const DType dtype = dtype_from_name(dtype_text);
  const py::buffer_info to = bytes_of(dst, true);
  const py::buffer_info from = bytes_of(src, false);
  if (nbytes_of(to) != nbytes_of(from) || nbytes_of(to) % dtype_size(dtype) != 0) {
    throw UsageError("scale: expected operands of one size, whole elements of " + dtype_text +
                     ", got " + std::to_string(nbytes_of(to)) + " and " +
                     std::to_string(nbytes_of(from)) + " bytes");
  }
  check_premul_factor(dtype, factor);
  scale_fn(dtype)(to.ptr, from.ptr, nbytes_of(to) / dtype_size(dtype), factor);
}

/// The dtype table: name, kind and bytes of one element.
py::list dtypes() {
  constexpr const char* kKinds[] = {"float", "int", "uint", "bool", "complex"};
  py::list rows;
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    rows.append(py::make_tuple(std::string(dtype_name(dtype)),
                               kKinds[static_cast<size_t>(dtype_kind(dtype))], dtype_size(dtype)));
  }
  return rows;
}

py::list ops() {
  py::list names;
  for (int o = 0; o < kNumOps; ++o) names.append(std::string(op_name(static_cast<Op>(o))));
  return names;
}

}  // namespace

void bind_reduce(py::module_& m) {
  m.def("reduce_copy_isa", &reduce_copy_isa,
        "The instruction set in use: avx512, avx2 or generic.");
  m.def("dtypes", &dtypes, "Rows of the dtype table: name, kind, bytes of one element.");
  m.def("ops", &ops, "Names of the reduction ops.");
  m.def(
      "why_unsupported",
      [](const std::string& dtype, const std::string& op) {
        return std::string(why_unsupported(dtype_from_name(dtype), op_from_name(op)));
      },
      py::arg("dtype"), py::arg("op"),
      "Why elements of dtype cannot be reduced with op; empty text if they can.");
  m.def(
      "_check_op",
      [](const std::string& dtype, const std::string& op) {
        check_op(dtype_from_name(dtype), op_from_name(op));
      },
      py::arg("dtype"), py::arg("op"));
  m.def("_scale", &scale, py::arg("dst"), py::arg("src"), py::arg("dtype"), py::arg("factor"),
        "dst <- src * factor, the first half of premul.");
  m.def("_reduce_copy", &reduce_copy, py::arg("srcs"), py::arg("dsts"), py::arg("dtype"),
        py::arg("op"), py::arg("divisor") = 1, py::arg("num_streaming") = 0,
        py::arg("first_to_peer") = py::none(), py::arg("past_caches") = false,
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
        const py::gil_scoped_release others_run;
        copy_bytes(to.ptr, from.ptr, nbytes_of(to), streaming);
      },
      py::arg("dst"), py::arg("src"), py::arg("streaming") = false, "dst <- src, byte for byte.");
}

}  // namespace pycoll
