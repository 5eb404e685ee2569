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

Planner::Planner(Selector selector, int rank, int num_slots,
                 std::array<int64_t, kNumProtocols> slot_payloads)
    : selector_(std::move(selector)),
      num_ranks_(selector_.topology().num_ranks),
      rank_(rank),
      num_slots_(num_slots),
      slot_payloads_(slot_payloads) {}

PlannedCall& Planner::find(const PlanKey& wanted) {
  if (!wanted.algorithm.empty()) return named(wanted);
  if (wanted.uneven) return choose(wanted);
  const Collective collective = schedule_of(wanted.collective);
  const auto root = static_cast<size_t>(wanted.root);
  std::vector<SizeClasses>& by_root =
      chosen_[static_cast<size_t>(wanted.order)][static_cast<size_t>(collective)];
  const auto class_idx = static_cast<size_t>(size_class(wanted.nbytes));
  if (root < by_root.size()) {
    PlannedCall* chosen = by_root[root][class_idx];
    if (chosen != nullptr) return *chosen;
  } else {
    by_root.resize(root + 1);
  }
  PlannedCall& chosen = choose(wanted);
  // A rule that begins or ends within the class is looked up for every message.
  const int64_t first = first_of_class(wanted.nbytes);
  if (selector_.may_share(collective, first, 2 * first - 1)) by_root[root][class_idx] = &chosen;
  return chosen;
}

PlannedCall& Planner::named(const PlanKey& wanted) {
  const size_t slash = wanted.algorithm.find('/');
  const ProtocolKind protocol = slash == std::string_view::npos
                                    ? default_protocol(wanted.nbytes)
                                    : protocol_from_name(wanted.algorithm.substr(slash + 1));
  PlannedCall& planned = plan_of(wanted, wanted.algorithm.substr(0, slash), protocol);
  if (planned.plan.order > wanted.order) {
    throw UsageError(own_key(wanted.collective, planned.plan.algorithm) +
                     " is not deterministic for this dtype and op: it does not reduce from rank 0 "
                     "on in one go; of those built in, these do: " +
                     names_in_order(wanted));
  }
  return planned;
}

std::string Planner::names_in_order(const PlanKey& wanted) {
  std::string names;
  for (const AlgorithmInfo& row : algorithms()) {
    if (row.collective != schedule_of(wanted.collective)) continue;
    if (plan_of(wanted, row.name, ProtocolKind::kSimple).plan.order > wanted.order) continue;
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  return names;
}

PlannedCall& Planner::plan_of(const PlanKey& wanted, std::string_view name, ProtocolKind protocol) {
  std::string key = own_key(wanted.collective, name) + "/" + protocol_name(protocol) + "/" +
                    std::to_string(wanted.root) + "/" +
                    (wanted.uneven ? "uneven" : std::to_string(size_class(wanted.nbytes)));
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  PlannedCall planned;
  planned.plan = make(wanted, name, protocol);
  planned.protocol = protocol;
  return plans_.emplace(std::move(key), std::move(planned)).first->second;
}

Plan Planner::make(const PlanKey& wanted, std::string_view name, ProtocolKind protocol) const {
  const Schedule schedule = generate(schedule_of(wanted.collective), name, wanted.root);
  PlanOptions options{.num_slots = num_slots_, .join_blocks = !wanted.uneven};
  Plan plan = make_plan(schedule, rank_, options);
  if (plan.spans_blocks) {
    // A tile of such a plan holds whole blocks: the largest ones of this size class must fit.
    constexpr int64_t kLargestElement = 16;
    const int64_t largest_block =
        2 * first_of_class(wanted.nbytes) / info(wanted.collective).blocks_per_message(num_ranks_);
    const int64_t payload = slot_payloads_[static_cast<size_t>(protocol)];
    if (tile_count(plan, payload, kLargestElement) * kLargestElement < largest_block) {
      options.join_blocks = false;
      plan = make_plan(schedule, rank_, options);
    }
  }
  if (wanted.uneven && wanted.collective == Collective::kAllToAll &&
      !plan.placement.scratch.empty()) {
    throw UsageError("all_to_all algorithm " + std::string(name) +
                     " passes blocks on through ranks that do not know their sizes: with counts, "
                     "use pairwise");
  }
  return plan;
}

PlannedCall& Planner::choose(const PlanKey& wanted) {
  if (wanted.uneven && wanted.collective == Collective::kAllToAll) {
    return plan_of(wanted, "pairwise", default_protocol(wanted.nbytes));
  }
  const Collective collective = schedule_of(wanted.collective);
  const Choice& choice = choice_for(collective, wanted.nbytes);
  PlannedCall& planned = plan_of(wanted, choice.algorithm, choice.protocol);
  if (planned.plan.order <= wanted.order) return planned;
  for (const Candidate& next : selector_.candidates(collective, first_of_class(wanted.nbytes))) {
    PlannedCall& other = plan_of(wanted, next.algorithm, next.protocol);
    if (other.plan.order <= wanted.order) return other;
  }
  throw UsageError("no algorithm of " + std::string(info(collective).name) +
                   " is deterministic for this dtype and op");
}

const Choice& Planner::choice_for(Collective collective, int64_t nbytes) {
  // Every message of a class gets the same answer, except where a rule tells them apart: that of
  // its smallest, a power of two, since messages often are.
  const int64_t first = first_of_class(nbytes);
  const bool shared = selector_.may_share(collective, first, 2 * first - 1);
  Choice& choice = choices_[{collective, size_class(nbytes)}];
  if (!shared || choice.algorithm.empty()) {
    choice = selector_.choose(collective, shared ? first : nbytes);
  }
  return choice;
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
  const PlannedCall& planned = find({collective, nbytes, root, "", false});
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
