// The Python module pycoll.torch._shim: makes backends, and knows their options.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/backend.h"

namespace pycoll::torch_backend {
namespace {

namespace py = pybind11;

std::chrono::milliseconds milliseconds_of(double timeout_s) {
  return std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3));
}

c10::intrusive_ptr<PycollBackend> make_backend(StorePtr store, int rank, int num_ranks,
                                               double timeout_s, std::string group_name,
                                               std::vector<uint64_t> global_ranks,
                                               const c10::intrusive_ptr<BackendOptions>& given) {
  auto options = given ? c10::make_intrusive<BackendOptions>(*given)
                       : c10::make_intrusive<BackendOptions>(milliseconds_of(timeout_s));
  options->timeout = milliseconds_of(timeout_s);
  options->group_name = std::move(group_name);
  options->global_ranks_in_group = std::move(global_ranks);
  return c10::make_intrusive<PycollBackend>(std::move(store), rank, num_ranks, std::move(options));
}

}  // namespace
}  // namespace pycoll::torch_backend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace pycoll::torch_backend;
  py::module_::import("torch._C._distributed_c10d");
  set_core(py::module_::import("pycoll._core")
               .attr("capi")
               .cast<py::capsule>()
               .get_pointer<const pycoll_api>());

  py::class_<BackendOptions, c10d::Backend::Options, c10::intrusive_ptr<BackendOptions>>(m,
                                                                                         "Options")
      .def(py::init([](double timeout_s, bool deterministic, std::optional<int> register_after) {
             auto options = c10::make_intrusive<BackendOptions>(milliseconds_of(timeout_s));
             options->deterministic = deterministic;
             if (register_after) options->register_after = *register_after;
             return options;
           }),
           py::arg("timeout_s") = 1800.0, py::arg("deterministic") = false,
           py::arg("register_after") = py::none())
      .def_readwrite("deterministic", &BackendOptions::deterministic)
      .def_readwrite("register_after", &BackendOptions::register_after)
      .def("__copy__",
           [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def(
          "__deepcopy__",
          [](const BackendOptions& self, const py::dict&) {
            return c10::make_intrusive<BackendOptions>(self);
          },
          py::arg("memo"));

  py::class_<PycollBackend, c10d::Backend, c10::intrusive_ptr<PycollBackend>>(m, "Backend")
      .def_property_readonly(
          "options",
          [](PycollBackend& self) {
            return c10::static_intrusive_pointer_cast<BackendOptions>(self.getBackendOptions());
          })
      .def_property_readonly(
          "_handle",
          [](const PycollBackend& self) { return py::capsule(self.comm(), "pycoll_comm"); },
          "Handle of the core's communicator, for pycoll._core.GroupRecords.")
      .def(
          "perform_nocolor_split", [](PycollBackend&, const py::object&) {},
          "Ranks outside every subgroup of a split return at once.");

  m.def("make_backend", &make_backend, py::arg("store"), py::arg("rank"), py::arg("num_ranks"),
        py::arg("timeout_s"), py::arg("group_name"), py::arg("global_ranks"), py::arg("options"),
        py::call_guard<py::gil_scoped_release>());
}
