// The choice of algorithm and protocol for a message: by the user's rule, else by the measured
// table, else by simulation with the topology's costs.
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

/// An algorithm with a protocol, and its known times.
struct Candidate {
  std::string algorithm;
  ProtocolKind protocol = ProtocolKind::kSimple;
  double predicted_s = 0;  // by simulation; 0: not simulated, since its schedule is not known yet
  double tabled_s = 0;     // by the measured table; 0: not in it

  std::string name() const { return algorithm + "/" + protocol_name(protocol); }
};

/// The algorithm that is built for the hosts of the ranks, and so has no row in the table.
inline constexpr std::string_view kHierarchical = "hierarchical";
/// Whether it exists: there are several hosts with equally many ranks, numbered consecutively.
bool has_hierarchical(const Topology& topology, Collective collective);

/// False for the slow algorithms of textbooks, which exist only for comparison.
bool is_candidate(Collective collective, std::string_view algorithm);
/// Whether the protocol may be worthwhile for messages of `nbytes`.
bool is_candidate(ProtocolKind protocol, int64_t nbytes);
/// Whether plain arrays are copied to where peers access them if mapped ones run directly, or if a
/// call names `direct`: two copies within the caches then cost less than reading another process's
/// memory (decision 0091).
bool pays_to_copy(Collective collective, int64_t nbytes);
/// Whether slots are as fast as mapped arrays where ranks trade places, without an exchange.
bool pays_to_use_traded_slots(int64_t nbytes);

/// Settings of a communicator, fixed before its first call and equal on all ranks.
struct SelectionInputs {
  Rules rules;
  TuningTable table;       // empty: there is none
  std::string table_note;  // where the table is from, or why there is none
  NetworkCost network;     // between hosts
  // All bytes between ranks have checksums (base/checksum.h), so only `simple` may carry them.
  bool checks_data = false;
  bool tunes_online = true;  // calls try several plans (decision 0116)
};

/// Candidates, best first. The caller takes the first that it can run: not every candidate reduces
/// in the required order or works on every array.
struct Ranking {
  std::vector<Candidate> candidates;
  std::string why;  // the reason for the first candidate, for people
};

class Selector {
 public:
  /// Costs fitted by the table replace those of `topology`.
  Selector(Topology topology, std::shared_ptr<const SelectionInputs> inputs);

  const Topology& topology() const { return topology_; }
  const Rules& rules() const { return inputs_->rules; }
  /// The protocol for an algorithm that is named without one.
  ProtocolKind default_protocol(int64_t nbytes) const;
  bool may_use(ProtocolKind protocol) const {
    return !inputs_->checks_data || protocol == ProtocolKind::kSimple;
  }

  /// Whether calls of so many bytes, whose plans have only been simulated, try several of them.
  /// Where ranks share cores, only all_to_all: no slot has several readers there, so copies without
  /// slots may pay. Trials have all ranks wait for each other, which takes turns of cores.
  bool tunes(Collective collective, int64_t nbytes) const;

  /// Ranks the candidates for messages of `nbytes` in such arrays, by `rule` unless it is null. The
  /// root does not matter, since all links have equal costs.
  Ranking rank(Collective collective, int64_t nbytes, Arrays arrays, const Rule* rule) const;
  /// Sources of the costs and of the table, for explain(): lines that end in '\n'.
  std::string describe_sources() const;

 private:
  std::vector<Schedule> schedules_for(Collective collective, const Rule* rule) const;
  std::vector<Candidate> simulate(Collective collective, int64_t nbytes, Arrays arrays,
                                  const Rule* rule) const;
  /// Whether several ranks of each core read the root's array from memory, each at another time.
  /// What comes through slots is read from there once, and stays in the caches for all ranks.
  bool reads_from_memory(Collective collective, int64_t nbytes) const;
  /// Sets tabled_s and returns where the times are from.
  std::string look_up(Collective collective, int64_t nbytes, Arrays arrays,
                      std::vector<Candidate>& candidates) const;

  Topology topology_;
  std::shared_ptr<const SelectionInputs> inputs_;
  std::string fitted_;  // protocols whose costs come from the table
};

}  // namespace pycoll
