// Operators of layers, on arrays of any library.
#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"
#include "bindings/arguments/array.h"
#include "bindings/bind.h"
#include "bindings/operators/im2col.h"

namespace py = pybind11;

namespace pycoll {
namespace {

using Pair = std::pair<int64_t, int64_t>;

void im2col_into(py::handle out, py::handle x, Pair kernel, Pair stride, Pair padding,
                 Pair dilation) {
  const ArrayView to(out.ptr(), "out", true);
  const ArrayView from(x.ptr(), "x", false);
  if (from.num_dims != 4) {
    throw UsageError("im2col: expected x of 4 dimensions, got " + std::to_string(from.num_dims));
  }
  const PatchAxis rows{from.shape[2], kernel.first, stride.first, padding.first, dilation.first};
  const PatchAxis columns{from.shape[3], kernel.second, stride.second, padding.second,
                          dilation.second};
  for (const PatchAxis& axis : {rows, columns}) {
    if (axis.kernel < 1 || axis.stride < 1 || axis.padding < 0 || axis.dilation < 1) {
      throw UsageError(
          "im2col: expected kernel, stride and dilation of 1 or more, and no negative padding");
    }
  }
  const int64_t num_planes = from.shape[0] * from.shape[1];
  const int64_t count =
      num_planes * rows.kernel * columns.kernel * rows.num_patches() * columns.num_patches();
  if (to.count != count || !to.same_elements(from)) {
    throw UsageError("im2col: expected out with " + std::to_string(count) + " elements of " +
                     from.dtype_text() + ", got " + std::to_string(to.count) + " of " +
                     to.dtype_text());
  }
  const py::gil_scoped_release others_may_run;
  im2col(from.data, to.data, num_planes, rows, columns, from.element_size);
}

}  // namespace

void bind_operators(py::module_& m) {
  m.def("_im2col", &im2col_into, py::arg("out"), py::arg("x"), py::arg("kernel"), py::arg("stride"),
        py::arg("padding"), py::arg("dilation"),
        "out <- the patches of x, of shape [N, C, H, W]; out has [N, C * kh * kw, patches].");
}

}  // namespace pycoll
