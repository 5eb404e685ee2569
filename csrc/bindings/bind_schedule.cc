// Python bindings of schedule/ and algorithms/: stateless functions on values.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "algorithms/hierarchical.h"
#include "algorithms/table/registry.h"
#include "base/error.h"
#include "schedule/explain.h"
#include "schedule/lower.h"
#include "schedule/schedule.h"
#include "schedule/simulate.h"
#include "schedule/verify.h"

namespace py = pybind11;

namespace pycoll {
namespace {

/// round, kind, first chunk, number of chunks, source rank, destination rank.
using MoveTuple = std::tuple<int32_t, std::string, int32_t, int32_t, int32_t, int32_t>;

/// A step together with the peers that the bits of its masks stand for.
struct PlacedStep {
  Step step;
  std::vector<int32_t> peers;

  std::vector<int32_t> ranks_in(uint64_t mask) const {
    std::vector<int32_t> ranks;
    for (size_t i = 0; i < peers.size() && i < kMaxPeers; ++i) {
      if ((mask >> i & 1) != 0) ranks.push_back(peers[i]);
    }
    return ranks;
  }
};

Move move_from_tuple(const MoveTuple& tuple) {
  const auto& [round, kind, first, count, src, dst] = tuple;
  if (kind != "copy" && kind != "reduce") {
    throw UsageError("a move's kind is 'copy' or 'reduce', got '" + kind + "'");
  }
  return {round, kind == "copy" ? MoveKind::kCopy : MoveKind::kReduce, {first, count}, src, dst};
}

MoveTuple tuple_from_move(const Move& move) {
  return {move.round,        move.kind == MoveKind::kCopy ? "copy" : "reduce",
          move.chunks.first, move.chunks.count,
          move.src,          move.dst};
}

Schedule build_schedule(const std::string& collective, const std::string& algorithm, int num_ranks,
                        int root) {
  return find_algorithm(collective_from_name(collective), algorithm).generate(num_ranks, root);
}

Schedule schedule_from_moves(const std::string& collective, const std::string& name, int num_ranks,
                             int num_chunks, int root, const std::vector<MoveTuple>& moves,
                             bool multicast) {
  ScheduleBuilder builder(collective_from_name(collective), name, num_ranks, num_chunks, root);
  if (!multicast) builder.without_multicast();
  for (const MoveTuple& move : moves) builder.add(move_from_tuple(move));
  return builder.build();
}

const char* order_name(Order order) {
  if (order == Order::kFlat) return "flat";
  return order == Order::kLeftFold ? "left_fold" : "other";
}

const char* goal_name(Goal::Kind kind) {
  switch (kind) {
    case Goal::Kind::kStart:
      return "start";
    case Goal::Kind::kReduced:
      return "reduced";
    case Goal::Kind::kPrefix:
      return "prefix";
    case Goal::Kind::kPrefixBefore:
      return "prefix_before";
    default:
      return "any";
  }
}

std::pair<int, std::string> min_slots(const Schedule& schedule,
                                      const std::vector<Program>& programs, int max_slots) {
  std::string error;
  const int slots = min_safe_slots(schedule, programs, max_slots, &error);
  return {slots, error};
}

/// `alpha`, `beta` and `gamma` hold num_ranks x num_ranks numbers, one row per source.
Simulation simulate_matrices(const std::vector<Program>& programs, int64_t nbytes,
                             int64_t tile_bytes, int slots, const std::vector<double>& alpha,
                             const std::vector<double>& beta, const std::vector<double>& gamma) {
  const size_t n = programs.size();
  if (alpha.size() != n * n || beta.size() != n * n || gamma.size() != n * n) {
    throw UsageError("simulate: expected " + std::to_string(n) + " x " + std::to_string(n) +
                     " link costs");
  }
  SimulateOptions options;
  options.nbytes = nbytes;
  options.tile_bytes = tile_bytes;
  options.slots = slots;
  options.cost = [&](int src, int dst) {
    const size_t at = static_cast<size_t>(src) * n + static_cast<size_t>(dst);
    return LinkCost{alpha[at], beta[at], gamma[at]};
  };
  return simulate(programs, options);
}

void bind_values(py::module_& m) {
  py::class_<PlacedStep>(m, "Step")
      .def_property_readonly("src_peers",
                             [](const PlacedStep& s) { return s.ranks_in(s.step.src_peers); })
      .def_property_readonly("dst_peers",
                             [](const PlacedStep& s) { return s.ranks_in(s.step.dst_peers); })
      .def_property_readonly("src_mask", [](const PlacedStep& s) { return s.step.src_peers; })
      .def_property_readonly("dst_mask", [](const PlacedStep& s) { return s.step.dst_peers; })
      .def_property_readonly("first_chunk", [](const PlacedStep& s) { return s.step.first_chunk; })
      .def_property_readonly("num_chunks", [](const PlacedStep& s) { return s.step.num_chunks; })
      .def_property_readonly("round", [](const PlacedStep& s) { return s.step.round; })
      .def_property_readonly("flags", [](const PlacedStep& s) { return int{s.step.flags}; })
      .def_property_readonly("read_local",
                             [](const PlacedStep& s) { return s.step.has(kReadLocal); })
      .def_property_readonly("write_local",
                             [](const PlacedStep& s) { return s.step.has(kWriteLocal); })
      .def_property_readonly("final", [](const PlacedStep& s) { return s.step.has(kFinal); })
      .def_property_readonly("multicast_src",
                             [](const PlacedStep& s) { return s.step.has(kMulticastSrc); })
      .def_property_readonly("multicast_dst",
                             [](const PlacedStep& s) { return s.step.has(kMulticastDst); })
      .def_property_readonly("same_phase",
                             [](const PlacedStep& s) { return s.step.has(kSamePhase); })
      .def(
          "replace",
          [](PlacedStep s, std::optional<uint64_t> src_mask, std::optional<uint64_t> dst_mask,
             std::optional<int32_t> first_chunk, std::optional<int32_t> num_chunks,
             std::optional<uint8_t> flags) {
            s.step.src_peers = src_mask.value_or(s.step.src_peers);
            s.step.dst_peers = dst_mask.value_or(s.step.dst_peers);
            s.step.first_chunk = first_chunk.value_or(s.step.first_chunk);
            s.step.num_chunks = num_chunks.value_or(s.step.num_chunks);
            s.step.flags = flags.value_or(s.step.flags);
            return s;
          },
          py::kw_only(), py::arg("src_mask") = py::none(), py::arg("dst_mask") = py::none(),
          py::arg("first_chunk") = py::none(), py::arg("num_chunks") = py::none(),
          py::arg("flags") = py::none(), "A copy with some fields changed.");

  py::class_<Program>(m, "Program")
      .def_readonly("rank", &Program::rank)
      .def_readonly("num_ranks", &Program::num_ranks)
      .def_readonly("num_chunks", &Program::num_chunks)
      .def_readonly("num_blocks", &Program::num_blocks)
      .def_readonly("blocks_per_payload", &Program::blocks_per_payload)
      .def_readonly("max_range", &Program::max_range)
      .def_readonly("peers", &Program::peers)
      .def_readonly("self_position", &Program::self_position)
      .def_property_readonly("steps",
                             [](const Program& program) {
                               std::vector<PlacedStep> steps;
                               for (const Step& step : program.steps) {
                                 steps.push_back({step, program.peers});
                               }
                               return steps;
                             })
      .def(
          "with_steps",
          [](Program program, const std::vector<PlacedStep>& steps) {
            program.steps.clear();
            for (const PlacedStep& placed : steps) program.steps.push_back(placed.step);
            return program;
          },
          py::arg("steps"), "A copy with other steps.");

  py::class_<Proof>(m, "Proof")
      .def_readonly("ok", &Proof::ok)
      .def_readonly("error", &Proof::error)
      .def_property_readonly("order", [](const Proof& proof) { return order_name(proof.order); })
      .def_readonly("slots", &Proof::slots);

  py::class_<Event>(m, "Event")
      .def_property_readonly("kind",
                             [](const Event& event) {
                               return event.kind == Event::Kind::kTransfer ? "transfer" : "reduce";
                             })
      .def_readonly("rank", &Event::rank)
      .def_readonly("peer", &Event::peer)
      .def_readonly("step", &Event::step)
      .def_readonly("tile", &Event::tile)
      .def_property_readonly(
          "chunks",
          [](const Event& event) { return std::pair(event.chunks.first, event.chunks.count); })
      .def_readonly("nbytes", &Event::nbytes)
      .def_readonly("start_s", &Event::start_s)
      .def_readonly("end_s", &Event::end_s);

  py::class_<Simulation>(m, "Simulation")
      .def_readonly("time_s", &Simulation::time_s)
      .def_readonly("rank_time_s", &Simulation::rank_time_s)
      .def_readonly("sent_bytes", &Simulation::sent_bytes)
      .def_readonly("events", &Simulation::events);
}

void bind_tables(py::module_& m) {
  py::class_<AlgorithmInfo>(m, "AlgorithmInfo")
      .def_property_readonly("collective",
                             [](const AlgorithmInfo& row) { return info(row.collective).name; })
      .def_property_readonly("name", [](const AlgorithmInfo& row) { return row.name; })
      .def_property_readonly("cost", [](const AlgorithmInfo& row) { return row.cost; })
      .def_property_readonly("source", [](const AlgorithmInfo& row) { return row.source; })
      .def(
          "sent_fraction",
          [](const AlgorithmInfo& row, int n, int rank, int root) {
            return row.sent_fraction(n, rank, root);
          },
          py::arg("n"), py::arg("rank"), py::arg("root") = 0,
          "Amount that `rank` sends, in units of the message.");
  m.def("algorithms",
        [] { return std::vector<AlgorithmInfo>(algorithms().begin(), algorithms().end()); });

  py::class_<CollectiveInfo>(m, "CollectiveInfo")
      .def_property_readonly("name", [](const CollectiveInfo& row) { return row.name; })
      .def_readonly("has_op", &CollectiveInfo::has_op)
      .def_readonly("has_root", &CollectiveInfo::has_root)
      .def(
          "num_blocks", [](const CollectiveInfo& row, int n) { return num_blocks(row.blocks, n); },
          py::arg("n"))
      .def(
          "blocks_per_payload",
          [](const CollectiveInfo& row, int n) { return row.blocks_per_payload(n); }, py::arg("n"))
      .def(
          "busbw_factor", [](const CollectiveInfo& row, int n) { return row.busbw_factor(n); },
          py::arg("n"));
  m.def("collectives",
        [] { return std::vector<CollectiveInfo>(collectives().begin(), collectives().end()); });
}

}  // namespace

void bind_schedule(py::module_& m) {
  bind_values(m);
  bind_tables(m);

  py::class_<Schedule>(m, "Schedule")
      .def_property_readonly("collective",
                             [](const Schedule& s) { return info(s.collective).name; })
      .def_readonly("algorithm", &Schedule::algorithm)
      .def_readonly("n", &Schedule::num_ranks)
      .def_readonly("num_chunks", &Schedule::num_chunks)
      .def_property_readonly("chunks_per_message",
                             [](const Schedule& s) {
                               return s.pieces_per_block() *
                                      info(s.collective).blocks_per_payload(s.num_ranks);
                             })
      .def_readonly("root", &Schedule::root)
      .def_readonly("multicast", &Schedule::multicast)
      .def_property_readonly("moves",
                             [](const Schedule& s) {
                               std::vector<MoveTuple> moves;
                               for (const Move& move : s.moves) {
                                 moves.push_back(tuple_from_move(move));
                               }
                               return moves;
                             })
      .def(
          "starts_with_value",
          [](const Schedule& s, int rank, int chunk) {
            return info(s.collective).starts_with_value(s.block_at(rank, chunk));
          },
          py::arg("rank"), py::arg("chunk"))
      .def(
          "goal",
          [](const Schedule& s, int rank, int chunk) {
            const Goal goal = info(s.collective).goal(s.block_at(rank, chunk));
            return std::pair(goal_name(goal.kind), goal.source);
          },
          py::arg("rank"), py::arg("chunk"), "(kind, rank whose start value it is).")
      .def(
          "programs",
          [](const Schedule& s, bool fuse, bool multicast, bool join_blocks, bool join_chunks,
             bool phases) { return lower(s, {fuse, multicast, join_blocks, join_chunks, phases}); },
          py::arg("fuse") = true, py::arg("multicast") = true, py::arg("join_blocks") = true,
          py::arg("join_chunks") = true, py::arg("phases") = false);

  m.def("build_schedule", &build_schedule, py::arg("collective"), py::arg("algorithm"),
        py::arg("n"), py::arg("root") = 0);
  m.def(
      "build_hierarchical",
      [](const std::string& collective, int num_ranks, int ranks_per_host, int root) {
        return hierarchical(collective_from_name(collective), num_ranks, ranks_per_host, root);
      },
      py::arg("collective"), py::arg("n"), py::arg("ranks_per_host"), py::arg("root") = 0);
  m.def("schedule_from_moves", &schedule_from_moves, py::arg("collective"), py::arg("name"),
        py::arg("n"), py::arg("num_chunks"), py::arg("root"), py::arg("moves"),
        py::arg("multicast") = true);
  m.def("verify_programs", &verify, py::arg("schedule"), py::arg("programs"), py::arg("slots"));
  m.def("min_safe_slots", &min_slots, py::arg("schedule"), py::arg("programs"),
        py::arg("max_slots"), "(smallest proved slot count or 0, why max_slots is not proved).");
  m.def("simulate_programs", &simulate_matrices, py::arg("programs"), py::arg("nbytes"),
        py::arg("tile_bytes"), py::arg("slots"), py::arg("alpha"), py::arg("beta"),
        py::arg("gamma"));
  m.def("explain_programs", &explain, py::arg("schedule"), py::arg("programs"));
  m.def(
      "explain_step",
      [](const Program& program, const PlacedStep& placed) {
        return explain_step(program, placed.step);
      },
      py::arg("program"), py::arg("step"));
}

}  // namespace pycoll
