// The submodule `pycoll._core.bootstrap`: how ranks find each other. Every call releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "base/environment.h"
#include "base/error.h"
#include "bindings/bind.h"
#include "bindings/communicator_object.h"
#include "bindings/interrupt.h"
#include "bootstrap/join/interfaces.h"
#include "bootstrap/join/rendezvous.h"
#include "bootstrap/join/tcp_store.h"
#include "bootstrap/join/tcp_store_server.h"
#include "bootstrap/local/local_group.h"
#include "bootstrap/local/process_info.h"
#include "bootstrap/security/tls_setting.h"
#include "transport/ring/segment.h"

namespace pycoll {
namespace {

namespace py = pybind11;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

py::bytes get(Store& store, const std::string& key, double timeout_s) {
  std::string value;
  {
    const py::gil_scoped_release release;
    value = store.get(key, interruptible_deadline(timeout_s));
  }
  return py::bytes(value);
}

/// `local`: there is no secret, and the kernel tells the user of each rank.
Token token_of(std::string text, bool local) {
  return {std::move(text), local ? Trust::kSameUser : Trust::kSecret};
}

void bind_store(py::module_& m) {
  py::class_<Store>(m, "Store", "Key-value store through which the ranks of a job meet.");
  py::class_<TcpStore, Store>(m, "TcpStore", "A store on rank 0's TcpStoreServer.")
      .def("close", &TcpStore::close, ReleaseGil())
      .def(py::init([](const std::string& address, int port, const std::string& token, int rank,
                       double timeout_s, bool local, const CommunicatorObject* old,
                       const std::vector<int>& members) {
             const Deadline::Interrupt watch = old != nullptr ? watch_of(*old, members) : nullptr;
             return std::make_unique<TcpStore>(address, port, token_of(token, local), rank,
                                               interruptible_deadline(timeout_s), watch);
           }),
           py::arg("address"), py::arg("port"), py::arg("token"), py::arg("rank"),
           py::arg("timeout_s"), py::arg("local") = false, py::arg("old") = nullptr,
           py::arg("members") = std::vector<int>(), ReleaseGil(),
           "Connects; PeerDiedError if one of `members` of `old` on this host ends meanwhile.")
      .def("set", &TcpStore::set, py::arg("key"), py::arg("value"), ReleaseGil())
      .def(
          "get",
          [](TcpStore& self, const std::string& key, double timeout_s) {
            return get(self, key, timeout_s);
          },
          py::arg("key"), py::arg("timeout_s"))
      .def("add", &TcpStore::add, py::arg("key"), py::arg("delta"), ReleaseGil())
      .def("report_death", &TcpStore::report_death, py::arg("rank"), py::arg("text"), ReleaseGil());

  py::class_<TcpStoreServer>(m, "TcpStoreServer", "Serves the stores of a session on one thread.")
      .def(py::init([](const std::string& address, int port, const std::string& token, bool local,
                       bool reports_deaths) {
             return std::make_unique<TcpStoreServer>(address, port, token_of(token, local),
                                                     reports_deaths);
           }),
           py::arg("address"), py::arg("port"), py::arg("token"), py::arg("local") = false,
           py::arg("reports_deaths") = false, ReleaseGil())
      .def_property_readonly("port", &TcpStoreServer::port)
      .def("stop", &TcpStoreServer::stop, py::arg("linger_s") = 0.0, ReleaseGil());
}

void bind_local_group(py::module_& m) {
  py::class_<LocalGroup>(m, "LocalGroup", "Shared memory and the processes of a host's ranks.")
      .def_property_readonly("memory_fd", [](const LocalGroup& self) { return self.memory.get(); })
      .def_property_readonly("pidfds",
                             [](const LocalGroup& self) {
                               std::vector<int> fds;
                               for (const auto& pidfd : self.pidfds) fds.push_back(pidfd->get());
                               return fds;
                             })
      .def_readonly("pids", &LocalGroup::pids)
      .def("close", [](LocalGroup& self) { self = LocalGroup(); });

  m.def(
      "form_local_group",
      [](const std::string& name, int rank, int num_ranks, size_t shared_bytes,
         const std::string& token, double timeout_s, const CommunicatorObject* old,
         const std::vector<int>& members) {
        Deadline deadline = interruptible_deadline(timeout_s);
        if (old != nullptr) deadline = deadline.with(watch_of(*old, members));
        return form_local_group(name, rank, num_ranks, shared_bytes, token, deadline);
      },
      py::arg("name"), py::arg("rank"), py::arg("num_ranks"), py::arg("shared_bytes"),
      py::arg("token"), py::arg("timeout_s"), py::arg("old") = nullptr,
      py::arg("members") = std::vector<int>(), ReleaseGil(),
      "Forms it; PeerDiedError if one of `members` of `old` ends meanwhile.");
}

Store& open_store(Session& session) {
  if (!session.store) throw UsageError("the session is closed");
  return *session.store;
}

void bind_session(py::module_& m) {
  py::class_<LaunchEnv>(m, "LaunchEnv", "Rank and size of this process, from its environment.")
      .def(py::init([](int rank, int num_ranks, std::string master_addr, int master_port,
                       std::string token, bool local) {
             LaunchEnv env;
             env.rank = rank;
             env.num_ranks = num_ranks;
             env.master_addr = std::move(master_addr);
             env.master_port = master_port;
             env.token = token_of(std::move(token), local);
             return env;
           }),
           py::arg("rank"), py::arg("num_ranks"), py::arg("master_addr"), py::arg("master_port"),
           py::arg("token"), py::arg("local") = false)
      .def_readonly("rank", &LaunchEnv::rank)
      .def_readonly("num_ranks", &LaunchEnv::num_ranks)
      .def_readonly("master_addr", &LaunchEnv::master_addr)
      .def_readonly("master_port", &LaunchEnv::master_port)
      .def_property_readonly("token", [](const LaunchEnv& self) { return self.token.text; })
      .def_property_readonly(
          "local", [](const LaunchEnv& self) { return self.token.trust == Trust::kSameUser; })
      .def_readonly("has_address", &LaunchEnv::has_address)
      .def_readonly("by_mpiexec", &LaunchEnv::by_mpiexec);
  m.def("read_launch_env", &read_launch_env);
  m.def("environment_table", [] {
    py::list rows;
    for (const EnvVariable& row : kEnvironment) {
      py::dict found;
      found["name"] = std::string(row.name);
      found["expected"] = env_expectation(row);
      found["default"] = std::string(row.otherwise);
      found["help"] = std::string(row.help);
      rows.append(found);
    }
    return rows;
  });
  m.def("read_environment",
        [](const std::string& name) { return env_text(name).value_or(std::string()); });
  m.def("check_environment", &check_environment);
  m.def("tls_is_on", &tls_is_on);
  m.def(
      "read_token",
      [](const std::string& otherwise) {
        const Token token = read_token(otherwise);
        return std::make_pair(token.text, token.trust == Trust::kSameUser);
      },
      py::arg("otherwise"));

  py::class_<Session>(m, "Session", "The ranks that have found each other, and their store.")
      .def_readonly("rank", &Session::rank)
      .def_readonly("num_ranks", &Session::num_ranks)
      .def_property_readonly("token", [](const Session& self) { return self.token.text; })
      .def_readonly("name", &Session::name)
      .def(
          "set",
          [](Session& self, const std::string& key, const std::string& value) {
            open_store(self).set(key, value);
          },
          py::arg("key"), py::arg("value"), ReleaseGil())
      .def(
          "get",
          [](Session& self, const std::string& key, double timeout_s) {
            return get(open_store(self), key, timeout_s);
          },
          py::arg("key"), py::arg("timeout_s"))
      .def(
          "exchange",
          [](Session& self, const std::string& topic, const std::string& own, double timeout_s) {
            std::vector<std::string> all;
            {
              const py::gil_scoped_release gil;
              all = self.exchange(topic, own, interruptible_deadline(timeout_s));
            }
            return std::vector<py::bytes>(all.begin(), all.end());
          },
          py::arg("topic"), py::arg("own"), py::arg("timeout_s"))
      .def(
          "close",
          [](Session& self) {
            self.over_mpi = nullptr;
            self.store.reset();
            self.server.reset();
          },
          ReleaseGil());
  m.def(
      "join",
      [](const LaunchEnv& env, double timeout_s) {
        return join(env, interruptible_deadline(timeout_s));
      },
      py::arg("env"), py::arg("timeout_s"), ReleaseGil());
}

}  // namespace

void bind_bootstrap(py::module_& m) {
  py::module_ bootstrap = m.def_submodule("bootstrap", "How ranks find each other.");
  bind_store(bootstrap);
  bind_local_group(bootstrap);
  bind_session(bootstrap);
  bootstrap.def("process_ended", &process_ended, py::arg("pidfd"));
  bootstrap.def("exit_signal", &exit_signal, py::arg("pidfd"));
  bootstrap.def("host_id", &host_id);
  bootstrap.attr("memory_layout") = SegmentLayout::name();
  bootstrap.def("interface_addresses", [](const std::string& filter) {
    std::vector<std::string> texts;
    for (const InterfaceAddress& one : interface_addresses(filter)) texts.push_back(one.text);
    return texts;
  });
}

}  // namespace pycoll
