// Finds the plan of a call: an array index when pycoll chooses, a map look-up for a named
// algorithm.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "plan/select.h"

namespace pycoll {

/// A plan with its protocol, and what running it has shown.
struct PlannedCall {
  Plan plan;
  ProtocolKind protocol = ProtocolKind::kSimple;
  uint16_t name_id = 0;    // of algorithm/protocol in this rank's records; 0: not written yet
  uint32_t name_hash = 0;  // the same for all ranks
  int64_t num_calls = 0;
  double measured_s = 0;  // running mean of the timed calls, 0 when there was none
};

/// What a plan depends on.
struct PlanKey {
  Collective collective = Collective::kAllReduce;
  int64_t nbytes = 0;  // of the message
  int root = 0;
  std::string_view algorithm;   // "", "NAME" or "NAME/PROTOCOL"
  bool uneven = false;          // its blocks differ in size
  Order order = Order::kOther;  // the least canonical one that will do
};

class Planner {
 public:
  /// `slot_payloads` are the bytes that a slot holds, by protocol.
  Planner(Selector selector, int rank, int num_slots,
          std::array<int64_t, kNumProtocols> slot_payloads);

  /// Raises UsageError for unknown names, for schedules that are not proved, and for those that
  /// cannot do with uneven blocks, or do not reduce in the order that is wanted.
  PlannedCall& find(const PlanKey& wanted);

  void add_schedule(const Schedule& schedule);
  bool knows(Collective collective, std::string_view name) const;
  std::string explain(Collective collective, int64_t nbytes, int root, std::string_view transport);

 private:
  // Messages of one size class, [2^(k-1), 2^k) bytes, share a plan.
  static constexpr int kNumSizeClasses = 64;

  PlannedCall& named(const PlanKey& wanted);
  PlannedCall& plan_of(const PlanKey& wanted, std::string_view name, ProtocolKind protocol);
  PlannedCall& choose(const PlanKey& wanted);
  std::string names_in_order(const PlanKey& wanted);
  Plan make(const PlanKey& wanted, std::string_view name, ProtocolKind protocol) const;
  const Choice& choice_for(Collective collective, int64_t nbytes);
  Schedule generate(Collective collective, std::string_view name, int root) const;

  using SizeClasses = std::array<PlannedCall*, kNumSizeClasses>;

  Selector selector_;
  int num_ranks_;
  int rank_;
  int num_slots_;
  std::array<int64_t, kNumProtocols> slot_payloads_;
  // What was chosen, by order, collective, root, and size class.
  static constexpr int kNumOrders = static_cast<int>(Order::kOther) + 1;
  std::array<std::array<std::vector<SizeClasses>, kNumCollectives>, kNumOrders> chosen_;
  std::map<std::pair<Collective, int>, Choice> choices_;  // by collective and size class
  std::map<std::string, PlannedCall> plans_;       // by collective/algorithm/protocol/root/class
  std::map<std::string, Schedule> own_schedules_;  // by collective/algorithm
};

}  // namespace pycoll
