// Finds what a call runs: an array index when pycoll chooses, a map look-up for a named algorithm.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/call_plan.h"
#include "plan/plan.h"
#include "plan/select.h"

namespace pycoll {

/// What a plan depends on.
struct PlanKey {
  Collective collective = Collective::kAllReduce;
  int64_t nbytes = 0;  // of the message
  int root = 0;
  std::string_view algorithm;   // "", "NAME" or "NAME/PROTOCOL"
  bool uneven = false;          // its blocks differ in size
  Order order = Order::kOther;  // the least canonical one that will do
};

/// What is fixed of the transport.
struct PlannerLinks {
  int num_slots = 0;
  std::array<int64_t, kNumProtocols> slot_payloads{};  // bytes that a slot holds, by protocol
  bool all_mapped = false;  // ranks are threads: they reach each other's arrays wherever they are
  bool one_host = true;     // else there are no slots with many readers, and nothing is direct
  bool multicast = true;    // a rank writes once what all others read
};

/// Builds an algorithm that the core does not know, for (collective, name, root). Raises UsageError
/// when nobody knows it.
using AlgorithmSource = std::function<Schedule(Collective, std::string_view, int)>;

class Planner {
 public:
  Planner(Selector selector, int rank, const PlannerLinks& links);

  /// Raises UsageError for unknown names, for schedules that are not proved, and for those that
  /// cannot do with uneven blocks, or do not reduce in the order that is wanted.
  CallPlan& find(const PlanKey& wanted);

  void add_schedule(const Schedule& schedule);
  /// Where rules of PYCOLL_ALGO find algorithms that are not built in.
  void set_algorithm_source(AlgorithmSource source) { source_ = std::move(source); }
  bool knows(Collective collective, std::string_view name, int root) const;
  /// For arrays of that kind.
  std::string explain(const PlanKey& wanted, Arrays arrays, std::string_view transport);

 private:
  // Messages of one size class, [2^(k-1), 2^k) bytes, share a plan.
  static constexpr int kNumSizeClasses = 64;
  static constexpr int kNumOrders = static_cast<int>(Order::kOther) + 1;

  CallPlan& named(const PlanKey& wanted);
  CallPlan name_plans(const PlanKey& wanted);
  CallPlan choose(const PlanKey& wanted, const Rule* rule);
  Ranking rank_candidates(const PlanKey& wanted, Arrays arrays, const Rule* rule) const;
  PlannedCall* first_that_can(const PlanKey& wanted, const Ranking& ranking, bool direct,
                              bool in_place);
  PlannedCall& slots_plan(const PlanKey& wanted, std::string_view name, ProtocolKind protocol);
  PlannedCall* direct_plan(const PlanKey& wanted, std::string_view name);
  Plan make(const PlanKey& wanted, std::string_view name, ProtocolKind protocol);
  Schedule generate(Collective collective, std::string_view name, int root);
  std::string names_in_order(const PlanKey& wanted);
  std::string describe_arrays(const PlanKey& wanted, const CallPlan& plan);

  using SizeClasses = std::array<CallPlan*, kNumSizeClasses>;
  // Order, collective, root, size class, uneven, and the rule or the name that decides.
  using ChosenKey = std::tuple<Order, Collective, int, int, bool, const Rule*>;
  using NamedKey = std::tuple<Order, Collective, int, int, bool, std::string>;

  Selector selector_;
  AlgorithmSource source_;
  int num_ranks_;
  int rank_;
  PlannerLinks links_;
  // Of `chosen_`, what has no border of a rule within its size class: by order, collective, root,
  // and size class.
  std::array<std::array<std::vector<SizeClasses>, kNumCollectives>, kNumOrders> by_class_;
  std::map<ChosenKey, CallPlan> chosen_;
  std::map<NamedKey, CallPlan, std::less<>> named_;
  // The last named call's: most name what the last one named.
  std::map<NamedKey, CallPlan, std::less<>>::iterator last_named_ = named_.end();
  std::map<std::string, PlannedCall> plans_;  // by collective/algorithm/protocol/root/class
  std::map<std::string, std::unique_ptr<PlannedCall>> direct_plans_;  // by .../root; null: none
  std::map<std::string, Schedule> schedules_;  // by collective/algorithm/root
};

}  // namespace pycoll
