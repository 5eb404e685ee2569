// Python bindings of topology/: fabrics, and simulations of collectives on them.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/table/scripts.h"
#include "base/error.h"
#include "bindings/bind.h"
#include "schedule/step.h"
#include "sim/fabric.h"
#include "sim/flow_simulation.h"
#include "sim/flow_system.h"
#include "sim/symmetry.h"

namespace py = pybind11;

namespace pycoll {
namespace {

/// A collective on a fabric, ready to be simulated with messages of any size.
struct FlowWorld {
  FlowSystem system;
  std::vector<LevelLoad> loads;
  int32_t num_ranks = 0;
};

FlowWorld make_world(const std::vector<Script>& scripts, const Fabric& fabric, bool may_compress) {
  FlowWorld world;
  world.num_ranks = fabric.num_ranks();
  world.system = make_flow_system(scripts, fabric, &world.loads);
  if (may_compress) {
    if (std::optional<FlowSystem> small = compress(world.system)) world.system = std::move(*small);
  }
  return world;
}

FlowWorld world_of_algorithm(const Fabric& fabric, const std::string& collective,
                             const std::string& algorithm, int root, std::vector<int32_t> groups,
                             const std::string& between, bool may_compress) {
  ScriptRequest request;
  request.collective = collective_from_name(collective);
  request.algorithm = algorithm;
  request.num_ranks = fabric.num_ranks();
  request.root = root;
  request.groups = std::move(groups);
  request.between = between;
  return make_world(make_scripts(request), fabric, may_compress);
}

FlowWorld world_of_programs(const Fabric& fabric, const std::vector<Program>& programs,
                            bool may_compress) {
  std::vector<Script> scripts;
  for (const Program& program : programs) scripts.push_back(script_of(program));
  return make_world(scripts, fabric, may_compress);
}

FlowResult play(const FlowWorld& world, double nbytes, double tile_fraction, int slots,
                uint64_t seed, double message_s, int num_bins, int64_t max_messages,
                const std::optional<py::function>& progress) {
  FlowOptions options;
  options.nbytes = nbytes;
  options.tile_fraction = tile_fraction;
  options.slots = slots;
  options.jitter.seed = seed;
  options.jitter.message_s = message_s;
  options.num_bins = num_bins;
  options.max_messages = max_messages;
  // Set even where the caller wants no progress, so that Ctrl-C ends the simulation.
  options.progress = [&](double done) {
    const py::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (progress) (*progress)(done);
  };
  const py::gil_scoped_release released;
  return simulate_flows(world.system, options);
}

void set_ranks(Fabric& fabric, const std::vector<double>& overhead_s,
               const std::vector<double>& gamma_s_per_byte, const std::vector<double>& start_s) {
  const auto n = static_cast<size_t>(fabric.num_ranks());
  if (overhead_s.size() != n || gamma_s_per_byte.size() != n || start_s.size() != n) {
    throw UsageError("topology: expected " + std::to_string(n) + " numbers, one per rank");
  }
  for (size_t rank = 0; rank < n; ++rank) {
    if (!(overhead_s[rank] >= 0) || !(gamma_s_per_byte[rank] >= 0) || !(start_s[rank] >= 0)) {
      throw UsageError("topology: rank " + std::to_string(rank) +
                       " has a negative cost, expected 0 or more");
    }
    fabric.ranks()[rank] = {overhead_s[rank], gamma_s_per_byte[rank], start_s[rank]};
  }
}

void bind_fabric(py::module_& m) {
  py::class_<FabricLevel>(m, "FabricLevel")
      .def(py::init([](std::string name, int size, int num_links, bool rails, bool carries_outside,
                       double link_bytes_per_s, double latency_s,
                       std::vector<double> pair_bytes_per_s, std::vector<double> pair_latency_s) {
             return FabricLevel{std::move(name),
                                size,
                                num_links,
                                rails,
                                carries_outside,
                                link_bytes_per_s,
                                latency_s,
                                std::move(pair_bytes_per_s),
                                std::move(pair_latency_s)};
           }),
           py::arg("name"), py::arg("size"), py::arg("num_links"), py::arg("rails"),
           py::arg("carries_outside"), py::arg("link_bytes_per_s"), py::arg("latency_s"),
           py::arg("pair_bytes_per_s"), py::arg("pair_latency_s"));
  py::class_<Fabric>(m, "Fabric")
      .def(py::init<std::vector<FabricLevel>>(), py::arg("levels"))
      .def_property_readonly("num_ranks", &Fabric::num_ranks)
      .def_property_readonly("num_links", &Fabric::num_links)
      .def("ranks_per_unit", &Fabric::ranks_per_unit, py::arg("level"))
      .def("link_name", &Fabric::link_name, py::arg("link"))
      .def("link_bytes_per_s", &Fabric::link_bytes_per_s, py::arg("link"))
      .def("latency_s", &Fabric::latency_s, py::arg("src"), py::arg("dst"))
      .def(
          "route",
          [](const Fabric& fabric, int32_t src, int32_t dst) {
            std::vector<int32_t> links;
            fabric.route(src, dst, links);
            return links;
          },
          py::arg("src"), py::arg("dst"))
      .def("scale_links", &Fabric::scale_links, py::arg("level"), py::arg("member"),
           py::arg("factor"))
      .def("set_ranks", &set_ranks, py::arg("overhead_s"), py::arg("gamma_s_per_byte"),
           py::arg("start_s"));
}

}  // namespace

void bind_topology(py::module_& m) {
  bind_fabric(m);
  py::class_<LevelLoad>(m, "LevelLoad")
      .def_readonly("num_links", &LevelLoad::num_links)
      .def_readonly("bytes_per_s", &LevelLoad::bytes_per_s)
      .def_readonly("fraction", &LevelLoad::fraction)
      .def_readonly("busiest_fraction", &LevelLoad::busiest_fraction)
      .def_readonly("busiest_bytes_per_s", &LevelLoad::busiest_bytes_per_s)
      .def_readonly("busiest_link", &LevelLoad::busiest_link);
  py::class_<FlowResult>(m, "FlowResult")
      .def_readonly("time_s", &FlowResult::time_s)
      .def_readonly("rank_time_s", &FlowResult::rank_time_s)
      .def_readonly("num_messages", &FlowResult::num_messages)
      .def_readonly("num_shares", &FlowResult::num_shares)
      .def_property_readonly("bin_s",
                             [](const FlowResult& result) { return result.timeline.bin_s; })
      .def_property_readonly("level_nbytes",
                             [](const FlowResult& result) { return result.timeline.level_nbytes; });
  py::class_<FlowWorld>(m, "FlowWorld")
      .def(py::init(&world_of_algorithm), py::arg("fabric"), py::arg("collective"),
           py::arg("algorithm"), py::arg("root"), py::arg("groups"), py::arg("between"),
           py::arg("may_compress"))
      .def_static("of_programs", &world_of_programs, py::arg("fabric"), py::arg("programs"),
                  py::arg("may_compress"))
      .def_property_readonly("num_ranks", [](const FlowWorld& world) { return world.num_ranks; })
      .def_property_readonly("num_actors",
                             [](const FlowWorld& world) { return world.system.actors.size(); })
      .def_property_readonly("num_messages",
                             [](const FlowWorld& world) { return world.system.num_messages(); })
      .def_readonly("loads", &FlowWorld::loads)
      .def("simulate", &play, py::arg("nbytes"), py::arg("tile_fraction"), py::arg("slots"),
           py::arg("seed"), py::arg("message_s"), py::arg("num_bins"), py::arg("max_messages"),
           py::arg("progress") = py::none());
  m.def(
      "exponential_delay_s",
      [](uint64_t seed, uint64_t stream, uint64_t idx, double mean_s) {
        return Jitter::exponential(seed, stream, idx, mean_s);
      },
      py::arg("seed"), py::arg("stream"), py::arg("idx"), py::arg("mean_s"),
      "A random delay that depends on the arguments alone.");
}

}  // namespace pycoll
