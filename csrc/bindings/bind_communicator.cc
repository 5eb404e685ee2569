// Communicator and Work for Python. bind_collectives.cc adds the collectives to the class.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "base/error.h"
#include "bindings/arguments/arguments.h"
#include "bindings/arguments/array.h"
#include "bindings/bind.h"
#include "bindings/communicator_object.h"
#include "bindings/device_objects.h"
#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/interrupt.h"
#include "join/init.h"
#include "schedule/schedule.h"

namespace pycoll {
namespace py = pybind11;

namespace {

struct LocalWorldObject {
  std::shared_ptr<LocalWorld> world;
};

constexpr int kMaxRegisterAfter = 1'000'000;

CommunicatorObject wrap(std::unique_ptr<Communicator> comm) {
  CommunicatorObject object;
  object.ranks_are_threads = comm->transport_name() == "local";
  if (!object.ranks_are_threads) object.registration_cache = std::make_unique<RegistrationCache>();
  comm->set_interrupted(signal_handlers_raise);
  comm->set_algorithm_source(
      [num_ranks = comm->size()](Collective collective, std::string_view name, int root) {
        const py::gil_scoped_acquire gil;
        const py::object build = py::module_::import("pycoll.schedule").attr("build");
        try {
          const py::object built = build(info(collective).name, name, num_ranks, root);
          return built.attr("core").cast<Schedule>();
        } catch (py::error_already_set& error) {
          if (!error.matches(py::module_::import("pycoll.errors").attr("UsageError"))) throw;
          throw UsageError(py::str(error.value()).cast<std::string>());
        }
      });
  object.comm = std::move(comm);
  object.sites = std::make_unique<CallSites>();
  return object;
}

/// Returns why the other ranks cannot access the array; empty: they can, or need not.
std::string register_array(CommunicatorObject& o, const py::object& x) {
  ArrayView view(x.ptr(), "x", /*writable=*/true, Memory::kHostOrDevice);
  const int device = view.device;
  auto* data = static_cast<std::byte*>(view.data);
  const auto nbytes = static_cast<size_t>(view.nbytes());
  std::shared_ptr<void> kept = keep_alive(std::move(view));
  const py::gil_scoped_release gil;
  if (device >= 0) return o.core().register_on_device(device, data, nbytes, std::move(kept));
  o.core().register_array(data, nbytes, std::move(kept));
  return {};
}

bool unregister_array(CommunicatorObject& o, const py::object& x) {
  const ArrayView view(x.ptr(), "x", /*writable=*/false, Memory::kHostOrDevice);
  const py::gil_scoped_release gil;
  if (view.device >= 0) {
    return o.core().unregister_on_device(static_cast<const std::byte*>(view.data));
  }
  return o.core().unregister_array(static_cast<std::byte*>(view.data));
}

}  // namespace

void bind_communicator(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("done", &Work::done)
      .def("wait", &Work::wait, py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
      .def("exception", [](const Work& work) -> py::object {
        const std::exception_ptr error = work.error();
        if (!error) return py::none();
        set_python_error(error);
        return py::error_already_set().value();
      });

  py::class_<CommunicatorObject> type(m, "Communicator");
  // Python's subclass takes over what the functions below return.
  type.def(py::init([](CommunicatorObject& other) { return std::move(other); }))
      .def_property_readonly("rank", [](const CommunicatorObject& o) { return o.core().rank(); })
      .def_property_readonly("host_rank",
                             [](const CommunicatorObject& o) { return o.core().host_rank(); })
      .def_property_readonly("host_number",
                             [](const CommunicatorObject& o) { return o.core().host_number(); })
      .def_property_readonly("size", [](const CommunicatorObject& o) { return o.core().size(); })
      .def_property_readonly("closed",
                             [](const CommunicatorObject& o) { return o.core().closed(); })
      .def_property(
          "deterministic", [](const CommunicatorObject& o) { return o.deterministic; },
          [](CommunicatorObject& o, const py::object& value) {
            o.deterministic = truth_of(value.ptr(), "deterministic");
          })
      .def_property(
          "register_after",
          [](const CommunicatorObject& o) {
            return o.registration_cache == nullptr ? 0 : o.registration_cache->after();
          },
          [](CommunicatorObject& o, const py::object& value) {
            const Py_ssize_t after = PyNumber_AsSsize_t(value.ptr(), nullptr);  // clips
            if (PyErr_Occurred() != nullptr || after < 0 || after > kMaxRegisterAfter) {
              PyErr_Clear();
              throw UsageError("register_after is " + repr_of(value.ptr()) +
                               ", expected a number of uses up to " +
                               std::to_string(kMaxRegisterAfter) + ", or 0 for never");
            }
            if (o.registration_cache != nullptr) {
              o.registration_cache->set_after(static_cast<int>(after));
            }
          })
      .def_property(
          "timeout_s", [](const CommunicatorObject& o) { return o.core().timeout_s(); },
          [](CommunicatorObject& o, py::handle value) {
            const double seconds = PyFloat_AsDouble(value.ptr());
            if (PyErr_Occurred() != nullptr || !(seconds > 0)) {
              PyErr_Clear();
              throw UsageError("timeout_s is " + repr_of(value.ptr()) +
                               ", expected a positive number of seconds");
            }
            o.core().set_timeout_s(seconds);
          })
      .def_property_readonly("transport",
                             [](const CommunicatorObject& o) { return o.core().transport_name(); })
      .def(
          "_check_alive",
          [](CommunicatorObject& o, const std::vector<int>& ranks) {
            o.core().check_alive_here(ranks, Look::kEarly);
          },
          "Raises PeerDiedError if one of the ranks is a process of this host that has ended.")
      .def("_announce_deaths", [](CommunicatorObject& o) { o.core().announce_deaths(); })
      .def("_abort",
           [](CommunicatorObject& o, const std::string& reason) { o.core().abort(reason); })
      .def("close",
           [](CommunicatorObject& o) {
             const py::gil_scoped_release gil;
             o.core().close();
           })
      .def("_allocate",
           [](CommunicatorObject& o, size_t nbytes) { return o.core().allocate(nbytes); })
      .def("_synchronize",
           [](CommunicatorObject& o) {
             const py::gil_scoped_release gil;
             o.core().synchronize();
           })
      .def("_allocate_on_device",
           [](CommunicatorObject& o, int device, size_t nbytes) {
             std::shared_ptr<DeviceMemory> memory;
             {
               const py::gil_scoped_release gil;
               memory = o.core().allocate_on_device(device, nbytes);
             }
             return for_python(std::move(memory));
           })
      .def("_register", register_array)
      .def("_unregister", unregister_array)
      .def("_disown", [](CommunicatorObject& o) { o.core().disown(); })
      .def("_split",
           [](CommunicatorObject& o, int color, int key) -> std::optional<CommunicatorObject> {
             std::unique_ptr<Communicator> part;
             {
               const py::gil_scoped_release gil;
               part = o.core().split(color, key, run_signal_handlers);
             }
             if (part == nullptr) return std::nullopt;
             CommunicatorObject object = wrap(std::move(part));
             object.deterministic = o.deterministic;
             if (o.registration_cache != nullptr)
               object.registration_cache->set_after(o.registration_cache->after());
             return object;
           })
      .def("_add_schedule",
           [](CommunicatorObject& o, const Schedule& s) {
             const py::gil_scoped_release gil;
             o.core().add_schedule(s);
           })
      .def("_explain",
           [](CommunicatorObject& o, const std::string& collective, int64_t nbytes, int root,
              bool mapped, bool on_device) {
             // A running operation may hold the lock while it needs the GIL to check for Ctrl-C.
             const py::gil_scoped_release gil;
             const Collective id = collective_from_name(collective);
             const Arrays arrays = mapped ? Arrays::kMapped : Arrays::kPlain;
             return on_device ? o.core().explain_on_device(id, nbytes, root, arrays)
                              : o.core().explain(id, nbytes, root, arrays);
           })
      .def_property_readonly("ledger", [](const CommunicatorObject& o) {
        const Ledger ledger = o.core().ledger();
        py::dict result;
        result["sent_bytes"] = ledger.sent_bytes;
        result["sent_messages"] = ledger.sent_messages;
        return result;
      });
  bind_collectives(type);
  bind_point_to_point(m, type);
  bind_records(m, type);

  m.attr("max_ranks") = kMaxRanks;
  py::class_<LocalWorldObject>(m, "LocalWorld");
  m.def("make_local_world", [](int num_ranks) { return LocalWorldObject{make_world(num_ranks)}; });
  m.def("init_from_environment", [](double timeout_s) {
    Joined joined;
    {
      const py::gil_scoped_release gil;
      joined = init_from_environment(timeout_s, run_signal_handlers);
    }
    return std::make_pair(wrap(std::move(joined.comm)), std::move(joined.session));
  });
  m.def(
      "connect_ranks",
      [](Store& store, int rank, int num_ranks, const std::string& name, const std::string& token,
         double timeout_s, const CommunicatorObject* old, const std::vector<int>& members) {
        std::unique_ptr<Communicator> comm;
        {
          const py::gil_scoped_release gil;
          Deadline deadline = interruptible_deadline(timeout_s);
          if (old != nullptr) deadline = deadline.with(watch_of(*old, members));
          comm = std::make_unique<Communicator>(
              connect_through(store, rank, num_ranks, name, {token}, deadline), timeout_s);
        }
        return wrap(std::move(comm));
      },
      py::arg("store"), py::arg("rank"), py::arg("num_ranks"), py::arg("name"), py::arg("token"),
      py::arg("timeout_s"), py::arg("old") = nullptr, py::arg("members") = std::vector<int>(),
      "Connects ranks that meet in a store, `members` of `old` among them; PeerDiedError if one of "
      "those ends.");
  m.def("init_at", [](const LaunchEnv& env, double timeout_s) {
    Joined joined;
    {
      const py::gil_scoped_release gil;
      joined = init_at(env, interruptible_deadline(timeout_s));
    }
    return std::make_pair(wrap(std::move(joined.comm)), std::move(joined.session));
  });
  m.def("init_over_mpi", [](uintptr_t handle, double timeout_s) {
    Joined joined;
    {
      const py::gil_scoped_release gil;
      const Deadline deadline = interruptible_deadline(timeout_s);
      joined = init_over_mpi(mpi().duplicate(handle, deadline), deadline);
    }
    return std::make_pair(wrap(std::move(joined.comm)), std::move(joined.session));
  });
  m.def("init_local", [](const LocalWorldObject& object, int rank, double timeout_s) {
    return wrap(
        std::make_unique<Communicator>(make_local_transport(object.world, rank), timeout_s));
  });
}

/// Memory that peers access directly, as an object with the buffer protocol. NumPy and torch make
/// arrays over it (pycoll/arrays/memory.py); it is freed with the last of them.
void bind_memory(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def_property_readonly("nbytes", [](const SharedMemory& memory) { return memory.nbytes(); })
      .def_buffer([](const SharedMemory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.nbytes()));
      });
}

}  // namespace pycoll
