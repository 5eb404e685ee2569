// Finds the plan of a call: an array index when pycoll chooses, a map look-up for a named
// algorithm.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "plan/plan.h"
#include "plan/select.h"
#include "transport/segment.h"

namespace pycoll {

/// A plan with its protocol, and what running it has shown.
struct PlannedCall {
  Plan plan;
  ProtocolKind protocol = ProtocolKind::kSimple;
  int64_t num_calls = 0;
  double measured_s = 0;  // running mean of the timed calls, 0 when there was none
};

class Planner {
 public:
  Planner(const Topology& topology, int rank, int num_slots);

  /// The plan for a message of `nbytes`. `algorithm` is "", "NAME" or "NAME/PROTOCOL".
  /// Raises UsageError for unknown names and for schedules that are not proved.
  PlannedCall& find(Collective collective, int64_t nbytes, int root, std::string_view algorithm);

  void add_schedule(const Schedule& schedule);
  bool knows(Collective collective, std::string_view name) const;
  std::string explain(Collective collective, int64_t nbytes, int root, std::string_view transport);

 private:
  // Messages of one size class, [2^(k-1), 2^k) bytes, share a plan.
  static constexpr int kNumSizeClasses = 64;

  PlannedCall& named(Collective collective, std::string_view algorithm, int root, int64_t nbytes);
  PlannedCall& choose(Collective collective, int64_t nbytes, int root);
  Schedule generate(Collective collective, std::string_view name, int root) const;

  Topology topology_;
  int rank_;
  int num_slots_;
  std::array<std::array<PlannedCall*, kNumSizeClasses>, kNumCollectives> chosen_{};  // root 0
  std::map<std::string, PlannedCall> plans_;       // by collective/algorithm/protocol/root/class
  std::map<std::string, Schedule> own_schedules_;  // by collective/algorithm
};

}  // namespace pycoll
