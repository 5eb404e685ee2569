// Finds the plan of a call: by an array index if pycoll chooses the algorithm, by a map look-up if
// the call names it.
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

/// The properties of a call on which its plan depends.
struct PlanKey {
  Collective collective = Collective::kAllReduce;
  int64_t nbytes = 0;  // size of the payload
  int root = 0;
  std::string_view algorithm;   // "", "NAME" or "NAME/PROTOCOL"
  bool uneven = false;          // the blocks differ in size
  Order order = Order::kOther;  // the least strict order that is sufficient
};

/// Fixed properties of the transport.
struct PlannerLinks {
  int num_slots = 0;
  std::array<int64_t, kNumProtocols> slot_payloads{};  // most bytes of a message, by protocol
  bool all_mapped = false;  // ranks are threads, and can access all arrays of each other
  bool one_host = true;     // else no slots with many readers, and no direct plans
  bool one_per_host = false;
  bool multicast = true;  // a rank writes a message to several readers once
  bool phases = false;    // a team of threads runs independent steps at once
};

/// Generates an algorithm that is not built in, for (collective, name, root). Raises UsageError if
/// the name is unknown.
using AlgorithmSource = std::function<Schedule(Collective, std::string_view, int)>;

class Planner {
 public:
  Planner(Selector selector, int rank, const PlannerLinks& links);

  const PlannerLinks& links() const { return links_; }
  /// Returns the plan of a call. Raises UsageError for unknown names, and for schedules that are
  /// not proved, cannot handle uneven blocks, or do not reduce in the wanted order.
  CallPlan& find(const PlanKey& wanted);

  void add_schedule(const Schedule& schedule);
  /// Sets the source of algorithms that rules of PYCOLL_ALGO name and that are not built in.
  void set_algorithm_source(AlgorithmSource source) { source_ = std::move(source); }
  bool knows(Collective collective, std::string_view name, int root) const;
  /// Text of Communicator::explain() for this kind of arrays.
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
                              bool in_place, Writes writes = Writes::kPeers);
  /// Plans for plain arrays that calls try, the one that `plan` has chosen first.
  TunedPlans tune(const PlanKey& wanted, const CallPlan& plan, const Ranking& plain,
                  const Ranking& mapped);
  /// The first plans of a ranking that reach arrays so, if they are not expected to take much
  /// longer than the best one.
  std::vector<TunedPlan> plans_to_try(const PlanKey& wanted, Reach reach, const Ranking& ranking,
                                      int max_plans);
  PlannedCall& slots_plan(const PlanKey& wanted, std::string_view name, ProtocolKind protocol,
                          bool claims_few_slots = false);
  PlannedCall* direct_plan(const PlanKey& wanted, std::string_view name, ProtocolKind protocol,
                           Writes writes);
  Plan make(const PlanKey& wanted, std::string_view name, ProtocolKind protocol);
  Schedule generate(Collective collective, std::string_view name, int root);
  std::string names_in_order(const PlanKey& wanted);
  std::string describe_arrays(const PlanKey& wanted, const CallPlan& plan);

  using SizeClasses = std::array<CallPlan*, kNumSizeClasses>;
  // Order, collective, root, size class, uneven, and the deciding rule or name.
  using ChosenKey = std::tuple<Order, Collective, int, int, bool, const Rule*>;
  using NamedKey = std::tuple<Order, Collective, int, int, bool, std::string>;

  Selector selector_;
  AlgorithmSource source_;
  int num_ranks_;
  int rank_;
  PlannerLinks links_;
  // Plans of `chosen_` whose size class contains no rule's border, by order, collective, root and
  // size class.
  std::array<std::array<std::vector<SizeClasses>, kNumCollectives>, kNumOrders> by_class_;
  std::map<ChosenKey, CallPlan> chosen_;
  std::map<NamedKey, CallPlan, std::less<>> named_;
  // Entry of the last named call. Most calls name the same algorithm as the last one.
  std::map<NamedKey, CallPlan, std::less<>>::iterator last_named_ = named_.end();
  std::map<std::string, PlannedCall> plans_;  // by collective/algorithm/protocol/root/class
  // By .../root and whose memory is written; null: none.
  std::map<std::string, std::unique_ptr<PlannedCall>> direct_plans_;
  std::map<std::string, Schedule> schedules_;  // by collective/algorithm/root
};

}  // namespace pycoll
