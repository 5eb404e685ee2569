#include "comm/planner.h"

#include <algorithm>
#include <bit>
#include <cstdio>

#include "algorithms/registry.h"
#include "base/error.h"

namespace pycoll {
namespace {

// A barrier is the all-reduce of one byte that nobody looks at.
Collective schedule_of(Collective collective) {
  return collective == Collective::kBarrier ? Collective::kAllReduce : collective;
}

int size_class(int64_t nbytes) { return std::bit_width(static_cast<uint64_t>(nbytes)); }

std::string own_key(Collective collective, std::string_view name) {
  return std::string(info(schedule_of(collective)).name) + "/" + std::string(name);
}

ProtocolKind protocol_from(std::string_view name) {
  if (name == "simple") return ProtocolKind::kSimple;
  if (name == "ll") return ProtocolKind::kLL;
  throw UsageError("unknown protocol '" + std::string(name) + "': expected simple or ll");
}

std::string microseconds(double s) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g us", s * 1e6);
  return text;
}

// Without a named protocol, a named algorithm takes ll up to here.
constexpr int64_t kLowLatencyBytes = 8 << 10;

}  // namespace

Planner::Planner(const Topology& topology, int rank, int num_slots)
    : topology_(topology), rank_(rank), num_slots_(num_slots) {}

PlannedCall& Planner::find(Collective collective, int64_t nbytes, int root,
                           std::string_view algorithm) {
  collective = schedule_of(collective);
  if (!algorithm.empty()) return named(collective, algorithm, root, nbytes);
  if (root != 0) return choose(collective, nbytes, root);
  PlannedCall*& slot =
      chosen_[static_cast<size_t>(collective)][static_cast<size_t>(size_class(nbytes))];
  if (slot == nullptr) slot = &choose(collective, nbytes, root);
  return *slot;
}

PlannedCall& Planner::named(Collective collective, std::string_view algorithm, int root,
                            int64_t nbytes) {
  const size_t slash = algorithm.find('/');
  const std::string_view name = algorithm.substr(0, slash);
  const ProtocolKind protocol = slash != std::string_view::npos
                                    ? protocol_from(algorithm.substr(slash + 1))
                                : nbytes <= kLowLatencyBytes ? ProtocolKind::kLL
                                                             : ProtocolKind::kSimple;
  std::string key = own_key(collective, name) + "/" + protocol_name(protocol) + "/" +
                    std::to_string(root) + "/" + std::to_string(size_class(nbytes));
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  PlannedCall planned;
  planned.plan = make_plan(generate(collective, name, root), rank_, num_slots_, true);
  planned.protocol = protocol;
  return plans_.emplace(std::move(key), std::move(planned)).first->second;
}

PlannedCall& Planner::choose(Collective collective, int64_t nbytes, int root) {
  // Every message of the class must get the same answer, on every rank: the class's largest.
  const int64_t representative = (int64_t{1} << size_class(nbytes)) - 1;
  const Candidate best = rank_candidates(collective, representative, root, topology_).front();
  return named(collective, best.algorithm + (best.low_latency ? "/ll" : "/simple"), root, nbytes);
}

Schedule Planner::generate(Collective collective, std::string_view name, int root) const {
  const auto own = own_schedules_.find(own_key(collective, name));
  if (own == own_schedules_.end()) {
    return find_algorithm(collective, name).generate(topology_.num_ranks, root);
  }
  if (own->second.root != root) {
    throw UsageError("algorithm " + std::string(name) + " was built for root " +
                     std::to_string(own->second.root) + ", not " + std::to_string(root));
  }
  return own->second;
}

void Planner::add_schedule(const Schedule& schedule) {
  if (schedule.num_ranks != topology_.num_ranks) {
    throw UsageError("schedule " + schedule.algorithm + " is for " +
                     std::to_string(schedule.num_ranks) + " ranks, this communicator has " +
                     std::to_string(topology_.num_ranks));
  }
  own_schedules_.insert_or_assign(own_key(schedule.collective, schedule.algorithm), schedule);
}

bool Planner::knows(Collective collective, std::string_view name) const {
  collective = schedule_of(collective);
  if (own_schedules_.count(own_key(collective, name)) != 0) return true;
  return std::any_of(algorithms().begin(), algorithms().end(), [&](const AlgorithmInfo& row) {
    return row.collective == collective && row.name == name;
  });
}

std::string Planner::explain(Collective collective, int64_t nbytes, int root,
                             std::string_view transport) {
  const PlannedCall& planned = find(collective, nbytes, root, "");
  const std::vector<Candidate> candidates =
      rank_candidates(schedule_of(collective), nbytes, root, topology_);
  std::string text = std::string(info(collective).name) + " of " + std::to_string(nbytes) +
                     " bytes on " + std::to_string(topology_.num_ranks) +
                     " ranks: " + planned.plan.algorithm + "/" + protocol_name(planned.protocol) +
                     " over " + std::string(transport) + "\n";
  text += "  proved: safe with " + std::to_string(planned.plan.min_slots) + " slots, links have " +
          std::to_string(num_slots_) + "\n";
  text +=
      "  measured: " +
      (planned.measured_s > 0 ? microseconds(planned.measured_s) + " (mean of " +
                                    std::to_string(planned.num_calls) + " calls of this size class)"
                              : std::string("not yet")) +
      "\n  predicted by simulation, the fastest first:\n";
  for (const Candidate& candidate : candidates) {
    char line[96];
    std::snprintf(line, sizeof(line), "    %-18s %-7s %12s\n", candidate.algorithm.c_str(),
                  candidate.low_latency ? "ll" : "simple",
                  microseconds(candidate.predicted_s).c_str());
    text += line;
  }
  if (topology_.oversubscribed()) {
    text += "  " + std::to_string(topology_.num_ranks) + " ranks share " +
            std::to_string(topology_.num_cores) +
            " cores: each message is taken to cost a turn of the scheduler\n";
  }
  return text;
}

}  // namespace pycoll
