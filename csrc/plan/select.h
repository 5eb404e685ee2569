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
  double predicted_s = 0;  // by simulation
  double tabled_s = 0;     // by the measured table; 0: it does not say

  std::string name() const { return algorithm + "/" + protocol_name(protocol); }
};

/// The textbook's slow algorithms are there to be compared with, not to be chosen.
bool is_candidate(Collective collective, std::string_view algorithm);
/// Whether messages of `nbytes` may be worth a try.
bool is_candidate(ProtocolKind protocol, int64_t nbytes);

/// What is fixed for a communicator before its first call, alike on all ranks.
struct SelectionInputs {
  Rules rules;
  TuningTable table;       // without rows: none
  std::string table_note;  // where the table is from, or why there is none
};

struct Choice {
  std::string algorithm;
  ProtocolKind protocol = ProtocolKind::kSimple;
  std::string why;  // for people
};

class Selector {
 public:
  /// Costs that the table has fitted replace those of `topology`.
  Selector(Topology topology, std::shared_ptr<const SelectionInputs> inputs);

  const Topology& topology() const { return topology_; }

  /// The choice for a message of `nbytes`, which does not depend on its root: all links are alike.
  Choice choose(Collective collective, int64_t nbytes) const;
  /// True when all sizes of [first_nbytes, last_nbytes] may share one choice.
  bool may_share(Collective collective, int64_t first_nbytes, int64_t last_nbytes) const {
    return inputs_->rules.agree_between(collective, first_nbytes, last_nbytes);
  }
  /// All candidates, the fastest by simulation first, with what the table says of each.
  std::vector<Candidate> candidates(Collective collective, int64_t nbytes) const;
  /// Where the costs and the table are from, for explain(): lines that end in '\n'.
  std::string describe_sources() const;

 private:
  // What may be chosen: a rule may name an algorithm, a protocol, or both.
  struct Wanted {
    std::string_view algorithm;  // empty: all candidates
    std::optional<ProtocolKind> protocol;
  };

  bool choose_by_table(Collective collective, int64_t nbytes, const Wanted& wanted,
                       Choice& choice) const;
  void choose_by_simulation(Collective collective, int64_t nbytes, const Wanted& wanted,
                            Choice& choice) const;
  std::vector<Candidate> simulate_all(Collective collective, int64_t nbytes,
                                      const Wanted& wanted) const;

  Topology topology_;
  std::shared_ptr<const SelectionInputs> inputs_;
  std::string fitted_;  // protocols whose costs are the table's
};

}  // namespace pycoll
