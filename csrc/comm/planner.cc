#include "comm/planner.h"

#include <algorithm>
#include <bit>

#include "algorithms/hierarchical.h"
#include "algorithms/table/registry.h"
#include "base/error.h"
#include "schedule/lower.h"

namespace pycoll {
namespace {

// A barrier is an all-reduce of one byte whose value is not used.
Collective schedule_of(Collective collective) {
  return collective == Collective::kBarrier ? Collective::kAllReduce : collective;
}

int size_class(int64_t nbytes) { return std::bit_width(static_cast<uint64_t>(nbytes)); }

/// The smallest message of the size class.
int64_t first_of_class(int64_t nbytes) {
  return nbytes == 0 ? 0 : int64_t{1} << (size_class(nbytes) - 1);
}

std::string key_of(Collective collective, std::string_view name, int root) {
  return std::string(info(schedule_of(collective)).name) + "/" + std::string(name) + "/" +
         std::to_string(root);
}

bool is_built_in(Collective collective, std::string_view name) {
  return std::any_of(algorithms().begin(), algorithms().end(), [&](const AlgorithmInfo& row) {
    return row.collective == schedule_of(collective) && row.name == name;
  });
}

std::string title_of(Collective collective, std::string_view name) {
  return std::string(info(schedule_of(collective)).name) + " algorithm " + std::string(name);
}

}  // namespace

Planner::Planner(Selector selector, int rank, const PlannerLinks& links)
    : selector_(std::move(selector)),
      num_ranks_(selector_.topology().num_ranks),
      rank_(rank),
      links_(links) {}

CallPlan& Planner::find(const PlanKey& wanted) {
  if (!wanted.algorithm.empty()) return named(wanted);
  const Collective collective = schedule_of(wanted.collective);
  const auto root = static_cast<size_t>(wanted.root);
  std::vector<SizeClasses>& by_root =
      by_class_[static_cast<size_t>(wanted.order)][static_cast<size_t>(collective)];
  const int class_idx = size_class(wanted.nbytes);
  if (root < by_root.size() && !wanted.uneven) {
    CallPlan* chosen = by_root[root][static_cast<size_t>(class_idx)];
    if (chosen != nullptr) return *chosen;
  }
  // If a rule begins or ends within the size class, every call looks up its rule.
  const int64_t first = first_of_class(wanted.nbytes);
  const bool shared = selector_.rules().agree_between(collective, first, 2 * first - 1);
  const Rule* rule = selector_.rules().find(collective, wanted.nbytes);
  const ChosenKey key{wanted.order, collective, wanted.root, class_idx, wanted.uneven, rule};
  auto found = chosen_.find(key);
  if (found == chosen_.end()) found = chosen_.emplace(key, choose(wanted, rule)).first;
  if (shared && !wanted.uneven) {
    if (by_root.size() <= root) by_root.resize(root + 1);
    by_root[root][static_cast<size_t>(class_idx)] = &found->second;
  }
  return found->second;
}

Ranking Planner::rank_candidates(const PlanKey& wanted, Arrays arrays, const Rule* rule) const {
  // All messages of a size class with the same rule share one ranking: that of the smallest
  // message, a power of two, which is a frequent size.
  return selector_.rank(schedule_of(wanted.collective), first_of_class(wanted.nbytes),
                        links_.all_mapped ? Arrays::kMapped : arrays, rule);
}

CallPlan Planner::choose(const PlanKey& wanted, const Rule* rule) {
  CallPlan plan;
  const bool own_counts = wanted.uneven && wanted.collective == Collective::kAllToAll;
  const auto fill = [&plan] {
    for (auto& places : plan.at) std::fill(std::begin(places), std::end(places), plan.slots);
  };
  if (own_counts) {
    plan.slots = &slots_plan(wanted, "pairwise", selector_.default_protocol(wanted.nbytes));
    fill();
    return plan;
  }
  try {
    const Ranking plain = rank_candidates(wanted, Arrays::kPlain, rule);
    plan.slots = first_that_can(wanted, plain, /*direct=*/false, /*in_place=*/true);
    if (plan.slots == nullptr) {
      throw UsageError("no " + std::string(info(wanted.collective).name) +
                       " algorithm is deterministic for this dtype and op");
    }
    fill();
    if (num_ranks_ == 1 || !links_.one_host) return plan;
    const Ranking mapped = rank_candidates(wanted, Arrays::kMapped, rule);
    const Candidate& best = plain.candidates.front();
    const bool chosen_by_simulation = rule == nullptr && best.tabled_s == 0;
    const bool trades = selector_.topology().trades_places() && !links_.all_mapped;
    if (chosen_by_simulation && mapped.candidates.front().tabled_s == 0 && trades &&
        pays_to_use_traded_slots(wanted.nbytes)) {
      return plan;
    }
    for (const Reach reach : {Reach::kMapped, Reach::kProcess}) {
      if (reach == Reach::kProcess && links_.all_mapped) continue;
      const Ranking& ranking = reach == Reach::kMapped ? mapped : plain;
      for (const bool in_place : {false, true}) {
        PlannedCall* first =
            first_that_can(wanted, ranking, /*direct=*/true, in_place, writes_of(reach));
        plan.at[static_cast<size_t>(reach)][in_place ? 1 : 0] = first;
        if (!is_direct(first->protocol)) continue;
        plan.exchanges_buffers = true;
        plan.uses_processes = plan.uses_processes || reach == Reach::kProcess;
      }
    }
    // A table's times of `direct` are of copies where they pay, so where it has some, it decides.
    const bool slots_are_slower = chosen_by_simulation ? !trades
                                  : best.tabled_s != 0 ? is_direct(best.protocol)
                                                       : true;
    plan.copies_arrays = !links_.all_mapped && slots_are_slower &&
                         is_direct(plan.of(Reach::kMapped, true)->protocol) &&
                         pays_to_copy(wanted.collective, wanted.nbytes);
    if (chosen_by_simulation && !links_.all_mapped &&
        selector_.tunes(wanted.collective, wanted.nbytes)) {
      plan.tuned = tune(wanted, plan, plain, mapped);
    }
  } catch (const UsageError& error) {
    if (rule == nullptr) throw;
    throw UsageError("rule '" + rule->text + "' of PYCOLL_ALGO: " + error.what());
  }
  if (!plan.exchanges_buffers) fill();  // the ranks do not know each other's arrays
  return plan;
}

PlannedCall* Planner::first_that_can(const PlanKey& wanted, const Ranking& ranking, bool direct,
                                     bool in_place, Writes writes) {
  for (const Candidate& candidate : ranking.candidates) {
    PlannedCall* planned = nullptr;
    if (!is_direct(candidate.protocol)) {
      planned = &slots_plan(wanted, candidate.algorithm, candidate.protocol);
    } else if (direct) {
      planned = direct_plan(wanted, candidate.algorithm, candidate.protocol, writes);
    }
    if (planned == nullptr || planned->plan.order > wanted.order) continue;
    if (!in_place || planned->in_place_allowed) return planned;
  }
  return nullptr;
}

CallPlan& Planner::named(const PlanKey& wanted) {
  const std::tuple key(wanted.order, schedule_of(wanted.collective), wanted.root,
                       size_class(wanted.nbytes), wanted.uneven, wanted.algorithm);
  if (last_named_ == named_.end() || key != last_named_->first) {
    last_named_ = named_.find(key);
    if (last_named_ == named_.end()) last_named_ = named_.emplace(key, name_plans(wanted)).first;
  }
  return last_named_->second;
}

CallPlan Planner::name_plans(const PlanKey& wanted) {
  const size_t slash = wanted.algorithm.find('/');
  const std::string_view name = wanted.algorithm.substr(0, slash);
  const ProtocolKind protocol = slash == std::string_view::npos
                                    ? selector_.default_protocol(wanted.nbytes)
                                    : protocol_from_name(wanted.algorithm.substr(slash + 1));
  if (!is_cpu_protocol(protocol) && !selector_.topology().of_devices) {
    throw UsageError(std::string(wanted.algorithm) + ": protocol " + protocol_name(protocol) +
                     " is for device arrays only");
  }
  if (!selector_.may_use(protocol)) {
    throw UsageError(std::string(wanted.algorithm) + ": protocol " + protocol_name(protocol) +
                     " has no checksums, which PYCOLL_CHECK_DATA=1 asks for: use simple");
  }
  CallPlan plan;
  PlannedCall* planned = nullptr;
  if (!is_direct(protocol)) {
    planned = &slots_plan(wanted, name, protocol);
  } else if (!links_.one_host) {
    throw UsageError(std::string(wanted.algorithm) + ": protocol " + protocol_name(protocol) +
                     " needs all ranks on one host");
  } else if (wanted.collective == Collective::kBarrier ||
             (wanted.uneven && wanted.collective == Collective::kAllToAll)) {
    throw UsageError(std::string(wanted.algorithm) + ": protocol " + protocol_name(protocol) +
                     " needs block sizes known to all ranks");
  } else if (protocol == ProtocolKind::kCopy && info(wanted.collective).has_op) {
    throw UsageError(std::string(wanted.algorithm) + ": protocol copy moves bytes and does not " +
                     "reduce, as " + std::string(info(wanted.collective).name) + " does");
  } else {
    planned = direct_plan(wanted, name, protocol, Writes::kPeers);
    if (planned == nullptr) {
      throw UsageError(title_of(wanted.collective, name) + "/" + protocol_name(protocol) +
                       " cannot run without slots on " + std::to_string(num_ranks_) +
                       " ranks: this schedule needs intermediate copies, which " +
                       protocol_name(protocol) + " cannot make");
    }
  }
  if (planned->plan.order > wanted.order) {
    throw UsageError(title_of(wanted.collective, name) +
                     " is not deterministic for this dtype and op: it does not reduce in rank "
                     "order; built-in algorithms that do: " +
                     names_in_order(wanted));
  }
  if (!is_direct(protocol)) {
    plan.slots = planned;
    for (auto& places : plan.at) std::fill(std::begin(places), std::end(places), planned);
    return plan;
  }
  // Until the ranks have exchanged their buffers, records show the plan for other arrays.
  PlanKey any = wanted;
  any.algorithm = {};
  plan.slots = find(any).slots;
  plan.exchanges_buffers = plan.uses_processes = true;
  for (const Reach reach : {Reach::kMapped, Reach::kProcess}) {
    PlannedCall* const direct = direct_plan(wanted, name, protocol, writes_of(reach));
    const bool in_place = direct != nullptr && direct->in_place_allowed;
    plan.at[static_cast<size_t>(reach)][0] = direct;
    plan.at[static_cast<size_t>(reach)][1] = in_place ? direct : nullptr;
  }
  plan.copies_arrays = !links_.all_mapped && plan.of(Reach::kMapped, true) != nullptr &&
                       pays_to_copy(wanted.collective, wanted.nbytes);
  return plan;
}

std::string Planner::names_in_order(const PlanKey& wanted) {
  std::string names;
  for (const AlgorithmInfo& row : algorithms()) {
    if (row.collective != schedule_of(wanted.collective)) continue;
    if (!has_few_peers(row.generate(num_ranks_, wanted.root))) continue;
    if (slots_plan(wanted, row.name, ProtocolKind::kSimple).plan.order > wanted.order) continue;
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  return names;
}

PlannedCall& Planner::slots_plan(const PlanKey& wanted, std::string_view name,
                                 ProtocolKind protocol, bool claims_few_slots) {
  std::string key = key_of(wanted.collective, name, wanted.root) + "/" + protocol_name(protocol) +
                    "/" + (wanted.uneven ? "uneven" : std::to_string(size_class(wanted.nbytes))) +
                    (claims_few_slots ? "/few" : "");
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  PlannedCall planned;
  planned.plan = make(wanted, name, protocol);
  planned.protocol = protocol;
  planned.claims_few_slots = claims_few_slots;
  return plans_.emplace(std::move(key), std::move(planned)).first->second;
}

PlannedCall* Planner::direct_plan(const PlanKey& wanted, std::string_view name,
                                  ProtocolKind protocol, Writes writes) {
  std::string key = key_of(wanted.collective, name, wanted.root) + "/" + protocol_name(protocol);
  if (writes == Writes::kOwnOnly) key += "/own";
  if (const auto found = direct_plans_.find(key); found != direct_plans_.end()) {
    return found->second.get();
  }
  std::unique_ptr<PlannedCall> planned;
  std::optional<DirectPlan> direct =
      make_direct_plan(generate(schedule_of(wanted.collective), name, wanted.root), rank_, writes);
  if (direct) {
    planned = std::make_unique<PlannedCall>();
    planned->plan = std::move(direct->plan);
    planned->protocol = protocol;
    planned->results = std::move(direct->results);
    planned->has_results = direct->has_results;
    planned->given = std::move(direct->given);
    planned->in_place_allowed = direct->in_place_allowed;
    planned->has_sole_readers = direct->has_sole_readers;
  }
  return direct_plans_.emplace(std::move(key), std::move(planned)).first->second.get();
}

Plan Planner::make(const PlanKey& wanted, std::string_view name, ProtocolKind protocol) {
  const Schedule schedule = generate(schedule_of(wanted.collective), name, wanted.root);
  PlanOptions options{.num_slots = links_.num_slots,
                      .multicast = links_.one_host && links_.multicast,
                      .join_blocks = !wanted.uneven,
                      .phases = links_.phases};
  Plan plan = make_plan(schedule, rank_, options);
  // The plan must fit the largest message of this size class.
  constexpr int64_t kLargestElement = 16;
  const int64_t largest_block =
      2 * first_of_class(wanted.nbytes) / info(wanted.collective).blocks_per_payload(num_ranks_);
  const int64_t payload = links_.slot_payloads[static_cast<size_t>(protocol)];
  const bool one_tile =
      tile_count(plan, payload, kLargestElement) * kLargestElement >= largest_block;
  // Blocks cannot be joined in a message of several tiles. Between hosts, chunks are not joined
  // either, so that each message that crosses hosts fills a slot.
  if (!wanted.uneven && !one_tile) {
    options.join_blocks = !plan.spans_blocks;
    options.join_chunks = links_.one_host || plan.program.max_range == 1;
    if (!options.join_blocks || !options.join_chunks) plan = make_plan(schedule, rank_, options);
  }
  if (wanted.uneven && wanted.collective == Collective::kAllToAll &&
      !plan.placement.scratch.empty()) {
    throw UsageError("all_to_all algorithm " + std::string(name) +
                     " forwards blocks through ranks that do not know their sizes; use pairwise "
                     "with counts");
  }
  return plan;
}

Schedule Planner::generate(Collective collective, std::string_view name, int root) {
  const std::string key = key_of(collective, name, root);
  if (const auto own = schedules_.find(key); own != schedules_.end()) return own->second;
  if (name == kHierarchical) {
    if (has_hierarchical(selector_.topology(), collective)) {
      return hierarchical(collective, num_ranks_, selector_.topology().hosts.ranks_per_host(),
                          root);
    }
    throw UsageError(title_of(collective, name) +
                     " is for all_reduce, reduce_scatter, all_gather, all_to_all and broadcast on "
                     "several hosts, each with the same number of consecutive ranks, at least two");
  }
  if (is_built_in(collective, name) || !source_) {
    return find_algorithm(collective, name).generate(num_ranks_, root);
  }
  add_schedule(source_(collective, name, root));
  return schedules_.at(key);
}

void Planner::add_schedule(const Schedule& schedule) {
  if (schedule.num_ranks != num_ranks_) {
    throw UsageError("schedule " + schedule.algorithm + " is for " +
                     std::to_string(schedule.num_ranks) + " ranks, this communicator has " +
                     std::to_string(num_ranks_));
  }
  schedules_.insert_or_assign(key_of(schedule.collective, schedule.algorithm, schedule.root),
                              schedule);
}

bool Planner::knows(Collective collective, std::string_view name, int root) const {
  return is_built_in(collective, name) || name == kHierarchical ||
         schedules_.count(key_of(collective, name, root)) != 0;
}

}  // namespace pycoll
