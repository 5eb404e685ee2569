// Which algorithm and protocol a message gets: by the user's rule, else by the measured table, else
// by simulation under the topology's costs.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plan/rules.h"
#include "plan/tuning.h"
#include "schedule/collectives.h"
#include "topology/topology.h"

namespace pycoll {

/// An algorithm with a protocol, and what is known of it.
struct Candidate {
  std::string algorithm;
  ProtocolKind protocol = ProtocolKind::kSimple;
  double predicted_s = 0;  // by simulation; 0: not simulated, since its schedule is not known yet
  double tabled_s = 0;     // by the measured table; 0: it does not say

  std::string name() const { return algorithm + "/" + protocol_name(protocol); }
};

/// The algorithm that is made for the hosts on which the ranks are, and so has no row in the table.
inline constexpr std::string_view kHierarchical = "hierarchical";
/// Whether there is one: several hosts with as many ranks each, whose numbers follow each other.
bool has_hierarchical(const Topology& topology, Collective collective);

/// The textbook's slow algorithms are there to be compared with, not to be chosen.
bool is_candidate(Collective collective, std::string_view algorithm);
/// Whether messages of `nbytes` may be worth a try.
bool is_candidate(ProtocolKind protocol, int64_t nbytes);
/// Of a named algorithm without a named protocol.
ProtocolKind default_protocol(int64_t nbytes);

/// What is fixed for a communicator before its first call, alike on all ranks.
struct SelectionInputs {
  Rules rules;
  TuningTable table;       // without rows: none
  std::string table_note;  // where the table is from, or why there is none
  NetworkCost network;     // between hosts
};

/// All that may carry a message, the one first that should. Who takes the first one that can has
/// the choice: not every one reduces in the order that is wanted, or works on every array.
struct Ranking {
  std::vector<Candidate> candidates;
  std::string why;  // the first one is first, for people
};

class Selector {
 public:
  /// Costs that the table has fitted replace those of `topology`.
  Selector(Topology topology, std::shared_ptr<const SelectionInputs> inputs);

  const Topology& topology() const { return topology_; }
  const Rules& rules() const { return inputs_->rules; }

  /// For messages of `nbytes` in such arrays, by `rule` if it is not null. It does not depend on
  /// the root: all links are alike.
  Ranking rank(Collective collective, int64_t nbytes, Arrays arrays, const Rule* rule) const;
  /// Where the costs and the table are from, for explain(): lines that end in '\n'.
  std::string describe_sources() const;

 private:
  std::vector<Schedule> schedules_for(Collective collective, const Rule* rule) const;
  std::vector<Candidate> simulate(Collective collective, int64_t nbytes, Arrays arrays,
                                  const Rule* rule) const;
  /// Fills in tabled_s; says where that is from.
  std::string look_up(Collective collective, int64_t nbytes, Arrays arrays,
                      std::vector<Candidate>& candidates) const;

  Topology topology_;
  std::shared_ptr<const SelectionInputs> inputs_;
  std::string fitted_;  // protocols whose costs are the table's
};

}  // namespace pycoll
