#include "plan/select.h"

#include <algorithm>
#include <tuple>

#include "algorithms/hierarchical.h"
#include "algorithms/table/registry.h"
#include "plan/estimate.h"
#include "schedule/lower.h"

namespace pycoll {
namespace {

// How much longer bytes of an array take that each rank reads from memory.
constexpr double kFromMemory = 3;

std::string size_text(int64_t nbytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  while (nbytes >= 1024 && nbytes % 1024 == 0 && unit + 1 < std::size(kUnits)) {
    nbytes /= 1024;
    ++unit;
  }
  return std::to_string(nbytes) + " " + kUnits[unit];
}

/// 0: what the rule asks for; 1: its algorithm with another protocol; 2: another algorithm.
int distance_from(const Rule* rule, std::string_view algorithm, ProtocolKind protocol) {
  if (rule == nullptr) return 0;
  if (!rule->algorithm.empty() && rule->algorithm != algorithm) return 2;
  return rule->protocol && *rule->protocol != protocol ? 1 : 0;
}

bool is_built_in(Collective collective, std::string_view algorithm) {
  return std::any_of(algorithms().begin(), algorithms().end(), [&](const AlgorithmInfo& row) {
    return row.collective == collective && row.name == algorithm;
  });
}

}  // namespace

bool has_hierarchical(const Topology& topology, Collective collective) {
  const int per_host = topology.hosts.ranks_per_host();
  return per_host > 1 && per_host < topology.num_ranks && has_hierarchical(collective);
}

bool is_candidate(Collective collective, std::string_view algorithm) {
  if (collective != Collective::kAllReduce) return true;
  for (std::string_view taught : {"reduce_broadcast", "all_to_all", "ring_naive"}) {
    if (algorithm == taught) return false;
  }
  return true;
}

bool is_candidate(ProtocolKind protocol, int64_t nbytes) {
  // ll carries 7 bytes in 8, and copies them once more. direct waits twice for all ranks.
  constexpr int64_t kMaxLowLatencyBytes = 64 << 10;
  constexpr int64_t kMinDirectBytes = 1 << 10;
  if (protocol == ProtocolKind::kLL) return nbytes <= kMaxLowLatencyBytes;
  // ll128, poison and copy do not work on every link or for every message, and no GPU measurement
  // shows yet when they are best: only an explicit request chooses them.
  if (!is_cpu_protocol(protocol)) return false;
  return protocol != ProtocolKind::kDirect || nbytes >= kMinDirectBytes;
}

bool pays_to_copy(Collective collective, int64_t nbytes) {
  constexpr int64_t kMaxCopiedBytes = 256 << 10;
  // For these, input and output share one copy, and lines move between the ranks' caches half as
  // often as with two. With two, reduce_scatter and all_gather were slower than through slots.
  return collective == Collective::kAllReduce && nbytes < kMaxCopiedBytes;
}

bool pays_to_use_traded_slots(int64_t nbytes) {
  constexpr int64_t kMinDirectBytes = 16 << 10;
  return nbytes < kMinDirectBytes;
}

Selector::Selector(Topology topology, std::shared_ptr<const SelectionInputs> inputs)
    : topology_(std::move(topology)), inputs_(std::move(inputs)) {
  for (const Arrays arrays : kAllArrays) {
    for (const ProtocolKind protocol : topology_.protocols()) {
      const TunedCost* fitted = inputs_->table.cost(protocol_name(protocol), topology_.num_ranks,
                                                    topology_.num_cores, arrays);
      if (fitted == nullptr) continue;
      topology_.cost(arrays, protocol) = fitted->cost;
      fitted_ += (fitted_.empty() ? "" : ", ") + fitted->protocol + " of " + arrays_name(arrays) +
                 " arrays on " + fitted->date + " with " + std::to_string(fitted->num_ranks) +
                 " ranks";
    }
  }
}

ProtocolKind Selector::default_protocol(int64_t nbytes) const {
  constexpr int64_t kLowLatencyBytes = 8 << 10;
  return nbytes <= kLowLatencyBytes && may_use(ProtocolKind::kLL) ? ProtocolKind::kLL
                                                                  : ProtocolKind::kSimple;
}

bool Selector::tunes(Collective collective, int64_t nbytes) const {
  constexpr int64_t kMinBytes = 16 << 10;
  constexpr int64_t kMinCrowdedBytes = 128 << 10;
  if (!inputs_->tunes_online) return false;
  return topology_.oversubscribed()
             ? collective == Collective::kAllToAll && nbytes >= kMinCrowdedBytes
             : nbytes >= kMinBytes;
}

Ranking Selector::rank(Collective collective, int64_t nbytes, Arrays arrays,
                       const Rule* rule) const {
  Ranking ranking;
  ranking.candidates = simulate(collective, nbytes, arrays, rule);
  const std::string source = look_up(collective, nbytes, arrays, ranking.candidates);
  // Among the candidates that the rule allows equally, measured ones come first, since simulated
  // times are not comparable to them.
  const auto place = [this, rule](const Candidate& candidate) {
    const bool measured = candidate.tabled_s > 0;
    return std::tuple(distance_from(rule, candidate.algorithm, candidate.protocol),
                      topology_.waits_in_streams && !is_direct(candidate.protocol), !measured,
                      measured ? candidate.tabled_s : candidate.predicted_s);
  };
  std::stable_sort(ranking.candidates.begin(), ranking.candidates.end(),
                   [&](const auto& a, const auto& b) { return place(a) < place(b); });
  const bool measured = !ranking.candidates.empty() && ranking.candidates.front().tabled_s > 0;
  const std::string by = measured ? source : "by simulation";
  if (rule == nullptr) {
    ranking.why = by;
    if (topology_.waits_in_streams) {
      ranking.why += ", among those whose waits are in streams if there is one";
    }
  } else {
    ranking.why = "by the rule '" + rule->text + "' of PYCOLL_ALGO";
    if (rule->algorithm.empty() || !rule->protocol) {
      ranking.why += ", the rest " + by;
    }
  }
  return ranking;
}

std::vector<Schedule> Selector::schedules_for(Collective collective, const Rule* rule) const {
  std::vector<Schedule> schedules;
  for (const AlgorithmInfo& row : algorithms()) {
    if (row.collective != collective) continue;
    if (is_candidate(collective, row.name) || (rule != nullptr && row.name == rule->algorithm)) {
      schedules.push_back(row.generate(topology_.num_ranks, /*root=*/0));
    }
  }
  if (has_hierarchical(topology_, collective)) {
    schedules.push_back(hierarchical(collective, topology_.num_ranks,
                                     topology_.hosts.ranks_per_host(), /*root=*/0));
  }
  std::erase_if(schedules, [](const Schedule& schedule) { return !has_few_peers(schedule); });
  return schedules;
}

bool Selector::reads_from_memory(Collective collective, int64_t nbytes) const {
  constexpr int64_t kMinBytes = int64_t{28} << 20;  // 8 ranks: 4 MiB, 4: 16
  return collective == Collective::kBroadcast && !topology_.of_devices &&
         topology_.num_ranks >= 2 * topology_.num_cores &&
         (topology_.num_ranks - 1) * nbytes >= kMinBytes;
}

std::vector<Candidate> Selector::simulate(Collective collective, int64_t nbytes, Arrays arrays,
                                          const Rule* rule) const {
  std::vector<Candidate> candidates;
  const bool one_host = topology_.hosts.num_hosts == 1;
  // The input of an all_to_all is as large as its output, and fills the caches as well. Ranks that
  // share a core use few slots, which stay there.
  const bool fills_twice = collective == Collective::kAllToAll && !topology_.oversubscribed();
  const int64_t touched = fills_twice ? 2 * nbytes : nbytes;
  for (const Schedule& schedule : schedules_for(collective, rule)) {
    std::vector<Program> programs;
    for (const ProtocolKind protocol : topology_.protocols()) {
      const bool asked = rule != nullptr && rule->protocol == protocol &&
                         distance_from(rule, schedule.algorithm, protocol) == 0;
      const bool preferred = topology_.waits_in_streams && is_direct(protocol);
      if (!may_use(protocol)) continue;
      if (!asked && !preferred && !is_candidate(protocol, nbytes)) continue;
      if (protocol == ProtocolKind::kCopy && info(collective).has_op) continue;
      LinkCost cost = topology_.cost_of(arrays, protocol, touched);
      if (is_direct(protocol) && reads_from_memory(collective, nbytes)) {
        cost.beta_s_per_byte *= kFromMemory;
      }
      Candidate candidate{schedule.algorithm, protocol, 0, 0};
      if (is_direct(protocol) && !one_host) continue;
      if (is_direct(protocol)) {
        const std::vector<DirectWork> work =
            direct_work(schedule, topology_.of_devices ? Writes::kPeers : writes_of(arrays));
        if (work.empty()) continue;
        const double block_nbytes =
            static_cast<double>(nbytes) / info(collective).blocks_per_payload(topology_.num_ranks);
        candidate.predicted_s = estimate_direct_s(work, block_nbytes, cost, topology_.num_cores);
      } else {
        if (programs.empty()) programs = lower_for(schedule, nbytes, topology_.hosts);
        candidate.predicted_s =
            estimate_s(programs, nbytes, cost, topology_.num_cores, topology_.hosts);
      }
      candidates.push_back(std::move(candidate));
    }
  }
  // An algorithm that is, or may yet be, registered in Python.
  if (rule != nullptr && !rule->algorithm.empty() && !is_built_in(collective, rule->algorithm) &&
      rule->algorithm != kHierarchical) {
    const bool asked = rule->protocol && may_use(*rule->protocol);
    if (asked) candidates.push_back({rule->algorithm, *rule->protocol, 0, 0});
    if (!asked || is_direct(*rule->protocol)) {
      candidates.push_back({rule->algorithm, default_protocol(nbytes), 0, 0});
    }
  }
  return candidates;
}

std::string Selector::look_up(Collective collective, int64_t nbytes, Arrays arrays,
                              std::vector<Candidate>& candidates) const {
  if (topology_.hosts.num_hosts > 1) return {};  // the table holds measurements on one host only
  const TunedAnswer answer = inputs_->table.at(info(collective).name, topology_.num_ranks,
                                               topology_.num_cores, arrays, nbytes);
  for (Candidate& candidate : candidates) {
    for (const TunedTime& time : answer.times) {
      if (time.choice == candidate.name()) candidate.tabled_s = time.time_s;
    }
  }
  std::string source =
      "by the measurement of " + answer.date + " at " + size_text(answer.below_nbytes);
  if (answer.above_nbytes != answer.below_nbytes) {
    source += " and " + size_text(answer.above_nbytes);
  }
  return source;
}

std::string Selector::describe_sources() const {
  std::string text;
  if (!inputs_->table_note.empty()) text += "  table: " + inputs_->table_note + "\n";
  text +=
      "  costs in the simulation: " + (fitted_.empty() ? "built in" : "fitted, " + fitted_) + "\n";
  if (topology_.hosts.num_hosts > 1) {
    const NetworkCost& cost = inputs_->network;
    char numbers[64];
    std::snprintf(numbers, sizeof(numbers), "%.3g us and %.3g Gbit/s", 1e6 * cost.alpha_s,
                  8e-9 / cost.beta_s_per_byte);
    text +=
        std::string("  between hosts: ") +
        (cost.beta_s_per_byte > 0 ? numbers + std::string(", measured at the start of the job\n")
                                  : "built in\n");
  }
  return text;
}

}  // namespace pycoll
