// Operators of layers, on arrays of any library.
#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"
#include "bindings/arguments/array.h"
#include "bindings/bind.h"
#include "bindings/operators/hogwild.h"
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

/// An array of one dtype; `count` elements, or any number for -1.
template <class T>
T* elements(const ArrayView& array, const char* what, DType dtype, int64_t count) {
  if (array.dtype != dtype || (count >= 0 && array.count != count)) {
    throw UsageError(std::string("hogwild: expected ") + what +
                     (count < 0 ? "" : " of " + std::to_string(count) + " elements") + " of " +
                     std::string(dtype_name(dtype)) + ", got " + std::to_string(array.count) +
                     " of " + array.dtype_text());
  }
  return static_cast<T*>(array.data);
}

SharedLock lock_of(int lock, const ArrayView& mutex) {
  if (lock < 0 || lock > 2) throw UsageError("hogwild: there is no lock " + std::to_string(lock));
  elements<uint8_t>(mutex, "a mutex", DType::kU8, kMutexBytes);
  return static_cast<SharedLock>(lock);
}

void make_mutex(py::handle memory) {
  const ArrayView view(memory.ptr(), "memory", true);
  make_shared_mutex(elements<uint8_t>(view, "a mutex", DType::kU8, kMutexBytes));
}

double factorize_ratings(py::handle p, py::handle q, py::handle users, py::handle items,
                         py::handle ratings, float mean, float rate, float l2, int lock,
                         py::handle mutex) {
  const ArrayView of_users(p.ptr(), "p", true), of_items(q.ptr(), "q", true);
  const ArrayView u(users.ptr(), "users", false), i(items.ptr(), "items", false);
  const ArrayView r(ratings.ptr(), "ratings", false), m(mutex.ptr(), "mutex", true);
  if (of_users.num_dims != 2 || of_items.num_dims != 2 || of_users.shape[1] < 1 ||
      of_users.shape[1] != of_items.shape[1]) {
    throw UsageError("hogwild: expected factors [users, dim + 1] and [items, dim + 1]");
  }
  const Factors factors{elements<float>(of_users, "factors", DType::kF32, -1),
                        elements<float>(of_items, "factors", DType::kF32, -1),
                        of_users.shape[0],
                        of_items.shape[0],
                        of_users.shape[1] - 1,
                        mean};
  const auto* u_data = elements<int32_t>(u, "users", DType::kI32, r.count);
  const auto* i_data = elements<int32_t>(i, "items", DType::kI32, r.count);
  const auto* r_data = elements<float>(r, "ratings", DType::kF32, r.count);
  const SharedLock kind = lock_of(lock, m);
  const py::gil_scoped_release others_may_run;
  return factorize(factors, u_data, i_data, r_data, r.count, rate, l2, kind, m.data);
}

double step_logistic_examples(py::handle weights, py::handle starts, py::handle features,
                              py::handle values, py::handle labels, py::handle order, float rate,
                              int lock, py::handle mutex) {
  const ArrayView w(weights.ptr(), "weights", true), s(starts.ptr(), "starts", false);
  const ArrayView f(features.ptr(), "features", false), v(values.ptr(), "values", false);
  const ArrayView y(labels.ptr(), "labels", false), o(order.ptr(), "order", false);
  const ArrayView m(mutex.ptr(), "mutex", true);
  const Examples examples{elements<int64_t>(s, "starts", DType::kI64, y.count + 1),
                          elements<int32_t>(f, "features", DType::kI32, v.count),
                          elements<float>(v, "values", DType::kF32, v.count),
                          elements<float>(y, "labels", DType::kF32, y.count),
                          y.count,
                          w.count};
  for (int64_t e = 0; e < y.count; ++e) {
    const int64_t first = examples.starts[e], last = examples.starts[e + 1];
    if (first < 0 || first > last || last > v.count) {
      throw UsageError("hogwild: expected starts that ascend from 0 to " + std::to_string(v.count));
    }
  }
  auto* w_data = elements<float>(w, "weights", DType::kF32, -1);
  const auto* o_data = elements<int64_t>(o, "order", DType::kI64, -1);
  const SharedLock kind = lock_of(lock, m);
  const py::gil_scoped_release others_may_run;
  return step_logistic(w_data, examples, o_data, o.count, rate, kind, m.data);
}

}  // namespace

void bind_operators(py::module_& m) {
  m.def("_im2col", &im2col_into, py::arg("out"), py::arg("x"), py::arg("kernel"), py::arg("stride"),
        py::arg("padding"), py::arg("dilation"),
        "out <- the patches of x, of shape [N, C, H, W]; out has [N, C * kh * kw, patches].");
  m.attr("_mutex_bytes") = kMutexBytes;
  m.def("_make_mutex", &make_mutex, py::arg("memory"),
        "Makes a mutex for several processes in an array of _mutex_bytes bytes that they share.");
  m.def("_factorize", &factorize_ratings, py::arg("p"), py::arg("q"), py::arg("users"),
        py::arg("items"), py::arg("ratings"), py::arg("mean"), py::arg("rate"), py::arg("l2"),
        py::arg("lock"), py::arg("mutex"),
        "Steps factors of ratings by each rating in turn; returns the sum of squared errors.");
  m.def("_step_logistic", &step_logistic_examples, py::arg("weights"), py::arg("starts"),
        py::arg("features"), py::arg("values"), py::arg("labels"), py::arg("order"),
        py::arg("rate"), py::arg("lock"), py::arg("mutex"),
        "Steps a logistic regression by examples in turn; returns the sum of the losses, nats.");
}

}  // namespace pycoll
