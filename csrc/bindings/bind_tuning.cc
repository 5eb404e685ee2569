// Python bindings of the measured table and of the functions with which `pycoll tune` makes one.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "algorithms/table/registry.h"
#include "base/version.h"
#include "bindings/arguments/array.h"
#include "bindings/bind.h"
#include "bindings/communicator_object.h"
#include "comm/machine.h"
#include "comm/settings.h"
#include "comm/timer.h"
#include "plan/estimate.h"

namespace py = pybind11;

namespace pycoll {
namespace {

double time_calls_of(CommunicatorObject& object, const std::string& collective, py::handle x,
                     py::handle out, const std::string& algorithm, int64_t num_calls) {
  const ArrayView input(x.ptr(), "x", false);
  const ArrayView output(out.ptr(), "out", true);
  if (input.count != output.count || input.dtype != output.dtype) {
    throw UsageError("expected x and out of one dtype and with equal numbers of elements");
  }
  const py::gil_scoped_release gil;
  return time_calls(object.core(), collective_from_name(collective),
                    {input.data, output.data, input.count, input.dtype}, algorithm, num_calls);
}

Arrays arrays_from_name(const std::string& name) {
  if (const auto found = find_arrays(name)) return *found;
  throw UsageError("unknown arrays '" + name + "': expected plain or mapped");
}

/// Candidates for messages of `nbytes`, as ALGORITHM/PROTOCOL.
std::vector<std::string> choices(const std::string& collective, int64_t nbytes) {
  const Collective id = collective_from_name(collective);
  std::vector<std::string> found;
  for (const AlgorithmInfo& row : algorithms()) {
    if (row.collective != id || !is_candidate(id, row.name)) continue;
    for (const ProtocolKind protocol : protocols()) {
      if (is_candidate(protocol, nbytes)) {
        found.push_back(std::string(row.name) + "/" + protocol_name(protocol));
      }
    }
  }
  return found;
}

/// Simulates a fixed list of messages under several sets of costs.
class Predictor {
 public:
  /// `cases`: collective, algorithm, nbytes; all by one protocol, with one kind of arrays.
  Predictor(const std::vector<std::tuple<std::string, std::string, int64_t>>& cases,
            const std::string& protocol, const std::string& arrays, int num_ranks, int num_cores)
      : num_cores_(num_cores) {
    const Writes writes = writes_of(arrays_from_name(arrays));
    const bool direct = protocol_from_name(protocol) == ProtocolKind::kDirect;
    for (const auto& [collective, algorithm, nbytes] : cases) {
      const AlgorithmInfo& row = find_algorithm(collective_from_name(collective), algorithm);
      const Schedule schedule = row.generate(num_ranks, 0);
      const int blocks = info(row.collective).blocks_per_payload(num_ranks);
      Message message{{}, {}, nbytes, static_cast<double>(nbytes) / blocks};
      if (direct) {
        message.work = direct_work(schedule, writes);
      } else {
        message.programs = lower_for(schedule, nbytes);
      }
      messages_.push_back(std::move(message));
    }
  }

  std::vector<double> times(double alpha, double beta, double gamma) const {
    std::vector<double> times;
    for (const Message& message : messages_) {
      const LinkCost cost{alpha, beta, gamma};
      times.push_back(message.programs.empty()
                          ? estimate_direct_s(message.work, message.block_nbytes, cost, num_cores_)
                          : estimate_s(message.programs, message.nbytes, cost, num_cores_));
    }
    return times;
  }

 private:
  struct Message {
    std::vector<Program> programs;
    std::vector<DirectWork> work;
    int64_t nbytes;
    double block_nbytes;
  };
  int num_cores_;
  std::vector<Message> messages_;
};

}  // namespace

void bind_tuning(py::module_& m) {
  py::class_<TunedCost>(m, "TunedCost")
      .def(
          py::init([](int num_ranks, int num_cores, const std::string& arrays, std::string date,
                      std::string protocol, double alpha_s, double beta_s_per_byte,
                      double gamma_s_per_byte) {
            return TunedCost{
                num_ranks,       num_cores,           arrays_from_name(arrays),
                std::move(date), std::move(protocol), {alpha_s, beta_s_per_byte, gamma_s_per_byte}};
          }),
          py::arg("num_ranks"), py::arg("num_cores"), py::arg("arrays"), py::arg("date"),
          py::arg("protocol"), py::arg("alpha_s"), py::arg("beta_s_per_byte"),
          py::arg("gamma_s_per_byte"))
      .def_readonly("num_ranks", &TunedCost::num_ranks)
      .def_readonly("num_cores", &TunedCost::num_cores)
      .def_property_readonly("arrays", [](const TunedCost& row) { return arrays_name(row.arrays); })
      .def_readonly("date", &TunedCost::date)
      .def_readonly("protocol", &TunedCost::protocol)
      .def_property_readonly("alpha_s", [](const TunedCost& row) { return row.cost.alpha_s; })
      .def_property_readonly("beta_s_per_byte",
                             [](const TunedCost& row) { return row.cost.beta_s_per_byte; })
      .def_property_readonly("gamma_s_per_byte",
                             [](const TunedCost& row) { return row.cost.gamma_s_per_byte; });

  py::class_<TunedSize>(m, "TunedSize")
      .def(py::init([](std::string collective, int num_ranks, int num_cores,
                       const std::string& arrays, int64_t nbytes, std::string date,
                       const std::map<std::string, double>& times) {
             TunedSize row{
                 std::move(collective), num_ranks, num_cores, arrays_from_name(arrays), nbytes,
                 std::move(date),       {}};
             for (const auto& [choice, time_s] : times) row.times.push_back({choice, time_s});
             return row;
           }),
           py::arg("collective"), py::arg("num_ranks"), py::arg("num_cores"), py::arg("arrays"),
           py::arg("nbytes"), py::arg("date"), py::arg("times"))
      .def_readonly("collective", &TunedSize::collective)
      .def_readonly("num_ranks", &TunedSize::num_ranks)
      .def_readonly("num_cores", &TunedSize::num_cores)
      .def_property_readonly("arrays", [](const TunedSize& row) { return arrays_name(row.arrays); })
      .def_readonly("nbytes", &TunedSize::nbytes)
      .def_readonly("date", &TunedSize::date)
      .def_property_readonly("times", [](const TunedSize& row) {
        py::dict times;
        for (const TunedTime& time : row.times) times[py::str(time.choice)] = time.time_s;
        return times;
      });

  py::class_<TuningTable>(m, "TuningTable")
      .def(py::init([](std::vector<TunedCost> costs, std::vector<TunedSize> sizes) {
             return TuningTable{std::string(kVersion), machine_fingerprint(), std::move(costs),
                                std::move(sizes)};
           }),
           py::arg("costs"), py::arg("sizes"), "A table of this version and machine.")
      .def_static("parse", &TuningTable::parse, py::arg("text"))
      .def("to_text", &TuningTable::to_text)
      .def_readonly("version", &TuningTable::version)
      .def_readonly("machine", &TuningTable::machine)
      .def_readonly("costs", &TuningTable::costs)
      .def_readonly("sizes", &TuningTable::sizes);

  m.def("machine_fingerprint", &machine_fingerprint);
  m.def("tuning_table_path", &tuning_table_path);
  m.def(
      "tuning_table_note", [] { return Settings::read().table_note; },
      "Origin of the measured table, or the reason why there is none.");
  m.def(
      "pays_to_copy",
      [](const std::string& collective, int64_t nbytes) {
        return pays_to_copy(collective_from_name(collective), nbytes);
      },
      "Whether `direct` copies plain arrays of so many bytes to where peers access them.",
      py::arg("collective"), py::arg("nbytes"));
  m.def("choices", &choices, py::arg("collective"), py::arg("nbytes"));
  py::class_<Predictor>(m, "Predictor", "Simulates the same messages under several costs.")
      .def(py::init<const std::vector<std::tuple<std::string, std::string, int64_t>>&,
                    const std::string&, const std::string&, int, int>(),
           py::arg("cases"), py::arg("protocol"), py::arg("arrays"), py::arg("n"), py::arg("cores"))
      .def("times", &Predictor::times, py::arg("alpha"), py::arg("beta"), py::arg("gamma"));
  m.def(
      "builtin_cost",
      [](const std::string& protocol, const std::string& arrays, int num_ranks, int num_cores) {
        const Topology topology = shared_memory_topology(num_ranks, num_cores);
        const LinkCost& cost =
            topology.cost(arrays_from_name(arrays), protocol_from_name(protocol));
        return std::tuple(cost.alpha_s, cost.beta_s_per_byte, cost.gamma_s_per_byte);
      },
      py::arg("protocol"), py::arg("arrays"), py::arg("n"), py::arg("cores"),
      "alpha, beta and gamma.");

  m.def("time_calls", &time_calls_of, py::arg("comm"), py::arg("collective"), py::arg("x"),
        py::arg("out"), py::arg("algorithm"), py::arg("num_calls"),
        "Seconds per call on this rank; x and out hold a message each.");
}

}  // namespace pycoll
