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

/// The smallest message of the size class.
int64_t first_of_class(int64_t nbytes) {
  return nbytes == 0 ? 0 : int64_t{1} << (size_class(nbytes) - 1);
}

std::string own_key(Collective collective, std::string_view name) {
  return std::string(info(schedule_of(collective)).name) + "/" + std::string(name);
}

std::string microseconds(double s) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g us", s * 1e6);
  return text;
}

// Without a named protocol, a named algorithm takes ll up to here.
constexpr int64_t kLowLatencyBytes = 8 << 10;

ProtocolKind default_protocol(int64_t nbytes) {
  return nbytes <= kLowLatencyBytes ? ProtocolKind::kLL : ProtocolKind::kSimple;
}

}  // namespace

Planner::Planner(Selector selector, int rank, int num_slots)
    : selector_(std::move(selector)),
      num_ranks_(selector_.topology().num_ranks),
      rank_(rank),
      num_slots_(num_slots) {}

PlannedCall& Planner::find(Collective collective, int64_t nbytes, int root,
                           std::string_view algorithm) {
  collective = schedule_of(collective);
  if (!algorithm.empty()) return named(collective, algorithm, root, nbytes);
  std::vector<SizeClasses>& by_root = chosen_[static_cast<size_t>(collective)];
  const auto class_idx = static_cast<size_t>(size_class(nbytes));
  if (static_cast<size_t>(root) < by_root.size()) {
    PlannedCall* chosen = by_root[static_cast<size_t>(root)][class_idx];
    if (chosen != nullptr) return *chosen;
  } else {
    by_root.resize(static_cast<size_t>(root) + 1);
  }
  PlannedCall& chosen = choose(collective, nbytes, root);
  // A rule that begins or ends within the class is looked up for every message.
  const int64_t first = first_of_class(nbytes);
  if (selector_.may_share(collective, first, 2 * first - 1)) {
    by_root[static_cast<size_t>(root)][class_idx] = &chosen;
  }
  return chosen;
}

PlannedCall& Planner::named(Collective collective, std::string_view algorithm, int root,
                            int64_t nbytes) {
  const size_t slash = algorithm.find('/');
  const ProtocolKind protocol = slash == std::string_view::npos
                                    ? default_protocol(nbytes)
                                    : protocol_from_name(algorithm.substr(slash + 1));
  return plan_of(collective, algorithm.substr(0, slash), protocol, root, nbytes);
}

PlannedCall& Planner::plan_of(Collective collective, std::string_view name, ProtocolKind protocol,
                              int root, int64_t nbytes) {
  std::string key = own_key(collective, name) + "/" + protocol_name(protocol) + "/" +
                    std::to_string(root) + "/" + std::to_string(size_class(nbytes));
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  PlannedCall planned;
  planned.plan = make_plan(generate(collective, name, root), rank_, num_slots_, true);
  planned.protocol = protocol;
  return plans_.emplace(std::move(key), std::move(planned)).first->second;
}

PlannedCall& Planner::choose(Collective collective, int64_t nbytes, int root) {
  const Choice choice = choice_for(collective, nbytes);
  return plan_of(collective, choice.algorithm, choice.protocol, root, nbytes);
}

Choice Planner::choice_for(Collective collective, int64_t nbytes) const {
  // Every message of a class gets the same answer, except where a rule tells them apart: that of
  // its smallest, a power of two, since messages often are.
  const int64_t first = first_of_class(nbytes);
  return selector_.choose(collective,
                          selector_.may_share(collective, first, 2 * first - 1) ? first : nbytes);
}

Schedule Planner::generate(Collective collective, std::string_view name, int root) const {
  const auto own = own_schedules_.find(own_key(collective, name));
  if (own == own_schedules_.end()) {
    return find_algorithm(collective, name).generate(num_ranks_, root);
  }
  if (own->second.root != root) {
    throw UsageError("algorithm " + std::string(name) + " was built for root " +
                     std::to_string(own->second.root) + ", not " + std::to_string(root));
  }
  return own->second;
}

void Planner::add_schedule(const Schedule& schedule) {
  if (schedule.num_ranks != num_ranks_) {
    throw UsageError("schedule " + schedule.algorithm + " is for " +
                     std::to_string(schedule.num_ranks) + " ranks, this communicator has " +
                     std::to_string(num_ranks_));
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
  const Topology& topology = selector_.topology();
  std::string text = std::string(info(collective).name) + " of " + std::to_string(nbytes) +
                     " bytes on " + std::to_string(num_ranks_) +
                     " ranks: " + planned.plan.algorithm + "/" + protocol_name(planned.protocol) +
                     " over " + std::string(transport) + "\n";
  text += "  chosen " + choice_for(schedule_of(collective), nbytes).why + "\n";
  text += "  proved: safe with " + std::to_string(planned.plan.min_slots) + " slots, links have " +
          std::to_string(num_slots_) + "\n";
  text +=
      "  measured: " +
      (planned.measured_s > 0 ? microseconds(planned.measured_s) + " (mean of " +
                                    std::to_string(planned.num_calls) + " calls of this size class)"
                              : std::string("not yet")) +
      "\n  predicted by simulation, the fastest first, and measured by `pycoll tune`:\n";
  for (const Candidate& candidate : selector_.candidates(schedule_of(collective), nbytes)) {
    char line[128];
    std::snprintf(line, sizeof(line), "    %-18s %-7s %12s %12s\n", candidate.algorithm.c_str(),
                  protocol_name(candidate.protocol), microseconds(candidate.predicted_s).c_str(),
                  candidate.tabled_s > 0 ? microseconds(candidate.tabled_s).c_str() : "-");
    text += line;
  }
  text += selector_.describe_sources();
  if (topology.oversubscribed()) {
    text += "  " + std::to_string(num_ranks_) + " ranks share " +
            std::to_string(topology.num_cores) +
            " cores: each message is taken to cost a turn of the scheduler\n";
  }
  return text;
}

}  // namespace pycoll
