#include "plan/select.h"

#include <algorithm>
#include <bit>

#include "algorithms/registry.h"
#include "schedule/lower.h"

namespace pycoll {
namespace {

constexpr int64_t kSlotBytes = 128 << 10;

/// A long message is so many equal tiles of its blocks: four of them show the steady state.
struct Sample {
  int32_t pieces;      // chunks of a block
  int64_t tile_bytes;  // of every block
  int64_t nbytes;
  int64_t num_tiles;
  double scale;

  Sample(const Program& program, int64_t message_nbytes)
      : pieces(program.num_chunks / program.num_blocks),
        tile_bytes(kSlotBytes * pieces / std::max(program.max_range, 1)),
        nbytes(std::min(message_nbytes, 4 * tile_bytes * program.blocks_per_message)),
        num_tiles(std::max<int64_t>(1, (nbytes + tile_bytes * program.blocks_per_message - 1) /
                                           (tile_bytes * program.blocks_per_message))),
        scale(nbytes == 0 ? 1.0 : static_cast<double>(message_nbytes) / nbytes) {}
};

/// No simulation ends sooner: a rank makes its transfers one after another.
double least_possible_s(const std::vector<Program>& programs, int64_t nbytes,
                        const LinkCost& cost) {
  const Sample sample(programs.front(), nbytes);
  const Program& first = programs.front();
  const double chunk_nbytes = static_cast<double>(sample.nbytes) / first.blocks_per_message /
                              sample.pieces / static_cast<double>(sample.num_tiles);
  double longest_s = 0;
  for (const Program& program : programs) {
    double rank_s = 0;
    for (const Step& step : program.steps) {
      rank_s += std::popcount(step.dst_peers) *
                (cost.alpha_s + cost.beta_s_per_byte * chunk_nbytes * step.num_chunks);
    }
    longest_s = std::max(longest_s, rank_s);
  }
  // A chunk may be cut to a byte less than its share.
  return 0.99 * longest_s * static_cast<double>(sample.num_tiles) * sample.scale;
}

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
  const std::vector<Candidate> candidates =
      simulate_all(collective, nbytes, wanted, /*best_only=*/true);
  if (!candidates.empty()) {
    choice.algorithm = candidates.front().algorithm;
    choice.protocol = candidates.front().protocol;
  }
  choice.why += "by simulation";
}

std::vector<Candidate> Selector::simulate_all(Collective collective, int64_t nbytes,
                                              const Wanted& wanted, bool best_only) const {
  std::vector<Candidate> candidates;
  double best_s = 1e300;
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
      const LinkCost& cost = topology_.cost(protocol);
      if (best_only && least_possible_s(programs, nbytes, cost) > best_s) continue;
      const double predicted_s = simulated_s(programs, nbytes, cost);
      best_s = std::min(best_s, predicted_s);
      candidates.push_back({std::string(row.name), protocol, predicted_s});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.predicted_s < b.predicted_s; });
  return candidates;
}

std::vector<Candidate> Selector::candidates(Collective collective, int64_t nbytes) const {
  std::vector<Candidate> found = simulate_all(collective, nbytes, {}, /*best_only=*/false);
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

std::vector<Program> lower_for(const Schedule& schedule, int64_t nbytes) {
  std::vector<Program> programs = lower(schedule);
  const Program& first = programs.front();
  const Sample sample(first, nbytes);
  const bool joins = first.max_range > sample.pieces;
  if (joins && nbytes > sample.tile_bytes * first.blocks_per_message) {
    return lower(schedule, {.join_blocks = false});
  }
  return programs;
}

double simulated_s(const std::vector<Program>& programs, int64_t nbytes, const LinkCost& cost) {
  const Sample sample(programs.front(), nbytes);
  SimulateOptions options;
  options.tile_bytes = sample.tile_bytes;
  options.nbytes = sample.nbytes;
  options.cost = [&cost](int, int) { return cost; };
  return simulate(programs, options).time_s * sample.scale;
}

}  // namespace pycoll
