#include "plan/select.h"

#include <algorithm>

#include "algorithms/registry.h"
#include "plan/estimate.h"

namespace pycoll {
namespace {

std::string size_text(int64_t nbytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  while (nbytes >= 1024 && nbytes % 1024 == 0 && unit + 1 < std::size(kUnits)) {
    nbytes /= 1024;
    ++unit;
  }
  return std::to_string(nbytes) + " " + kUnits[unit];
}

}  // namespace

bool is_candidate(Collective collective, std::string_view algorithm) {
  if (collective != Collective::kAllReduce) return true;
  for (std::string_view taught : {"reduce_broadcast", "all_to_all", "ring_naive"}) {
    if (algorithm == taught) return false;
  }
  return true;
}

bool is_candidate(ProtocolKind protocol, int64_t nbytes) {
  // ll carries 7 bytes in 8, and copies them once more.
  constexpr int64_t kMaxLowLatencyBytes = 64 << 10;
  return protocol != ProtocolKind::kLL || nbytes <= kMaxLowLatencyBytes;
}

Selector::Selector(Topology topology, std::shared_ptr<const SelectionInputs> inputs)
    : topology_(std::move(topology)), inputs_(std::move(inputs)) {
  for (const ProtocolKind protocol : protocols()) {
    const TunedCost* fitted =
        inputs_->table.cost(protocol_name(protocol), topology_.num_ranks, topology_.num_cores);
    if (fitted == nullptr) continue;
    topology_.cost(protocol) = fitted->cost;
    fitted_ += (fitted_.empty() ? "" : ", ") + fitted->protocol + " on " + fitted->date + " with " +
               std::to_string(fitted->num_ranks) + " ranks";
  }
}

Choice Selector::choose(Collective collective, int64_t nbytes) const {
  Choice choice;
  Wanted wanted;
  if (const Rule* rule = inputs_->rules.find(collective, nbytes)) {
    choice.why = "by the rule '" + rule->text + "' of PYCOLL_ALGO";
    choice.algorithm = rule->algorithm;
    if (!rule->algorithm.empty() && rule->protocol) {
      choice.protocol = *rule->protocol;
      return choice;
    }
    choice.why += ", and what that leaves open ";
    wanted = {rule->algorithm, rule->protocol};
  }
  if (!choose_by_table(collective, nbytes, wanted, choice)) {
    choose_by_simulation(collective, nbytes, wanted, choice);
  }
  return choice;
}

bool Selector::choose_by_table(Collective collective, int64_t nbytes, const Wanted& wanted,
                               Choice& choice) const {
  const TunedAnswer answer =
      inputs_->table.at(info(collective).name, topology_.num_ranks, topology_.num_cores, nbytes);
  for (const TunedTime& time : answer.times) {
    const size_t slash = time.choice.find('/');
    const std::string_view algorithm = std::string_view(time.choice).substr(0, slash);
    const auto protocol = find_protocol(std::string_view(time.choice).substr(slash + 1));
    const bool known = std::any_of(algorithms().begin(), algorithms().end(), [&](const auto& row) {
      return row.collective == collective && row.name == algorithm;
    });
    if (!protocol || !known) continue;
    if (wanted.algorithm.empty() ? !is_candidate(collective, algorithm)
                                 : algorithm != wanted.algorithm) {
      continue;
    }
    if (wanted.protocol && *wanted.protocol != *protocol) continue;
    choice.algorithm = algorithm;
    choice.protocol = *protocol;
    choice.why += "by the measurement of " + answer.date + " at " + size_text(answer.below_nbytes);
    if (answer.above_nbytes != answer.below_nbytes) {
      choice.why += " and " + size_text(answer.above_nbytes);
    }
    return true;
  }
  return false;
}

void Selector::choose_by_simulation(Collective collective, int64_t nbytes, const Wanted& wanted,
                                    Choice& choice) const {
  const std::vector<Candidate> candidates = simulate_all(collective, nbytes, wanted);
  if (!candidates.empty()) {
    choice.algorithm = candidates.front().algorithm;
    choice.protocol = candidates.front().protocol;
  }
  choice.why += "by simulation";
}

std::vector<Candidate> Selector::simulate_all(Collective collective, int64_t nbytes,
                                              const Wanted& wanted) const {
  std::vector<Candidate> candidates;
  for (const AlgorithmInfo& row : algorithms()) {
    if (row.collective != collective) continue;
    if (wanted.algorithm.empty() ? !is_candidate(collective, row.name)
                                 : row.name != wanted.algorithm) {
      continue;
    }
    const std::vector<Program> programs =
        lower_for(row.generate(topology_.num_ranks, /*root=*/0), nbytes);
    for (const ProtocolKind protocol : protocols()) {
      if (wanted.protocol && *wanted.protocol != protocol) continue;
      if (!wanted.protocol && !is_candidate(protocol, nbytes)) continue;
      const double predicted_s =
          estimate_s(programs, nbytes, topology_.cost(protocol), topology_.num_cores);
      candidates.push_back({std::string(row.name), protocol, predicted_s});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.predicted_s < b.predicted_s; });
  return candidates;
}

std::vector<Candidate> Selector::candidates(Collective collective, int64_t nbytes) const {
  std::vector<Candidate> found = simulate_all(collective, nbytes, {});
  const TunedAnswer answer =
      inputs_->table.at(info(collective).name, topology_.num_ranks, topology_.num_cores, nbytes);
  for (Candidate& candidate : found) {
    for (const TunedTime& time : answer.times) {
      if (time.choice == candidate.name()) candidate.tabled_s = time.time_s;
    }
  }
  return found;
}

std::string Selector::describe_sources() const {
  std::string text;
  if (!inputs_->table_note.empty()) text += "  table: " + inputs_->table_note + "\n";
  text +=
      "  costs of the simulation: " + (fitted_.empty() ? "built in" : "fitted, " + fitted_) + "\n";
  return text;
}

}  // namespace pycoll
