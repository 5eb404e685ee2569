#include "plan/select.h"

#include <algorithm>

#include "algorithms/registry.h"
#include "schedule/lower.h"

namespace pycoll {
namespace {

// The textbook's slow algorithms are there to be compared with, not to be chosen.
bool is_candidate(std::string_view name) {
  for (std::string_view taught : {"reduce_broadcast", "all_to_all", "ring_naive"}) {
    if (name == taught) return false;
  }
  return true;
}

constexpr int64_t kMaxLowLatencyBytes = 64 << 10;
constexpr int64_t kSlotBytes = 128 << 10;

}  // namespace

std::vector<Candidate> rank_candidates(Collective collective, int64_t nbytes, int root,
                                       const Topology& topology) {
  std::vector<Candidate> candidates;
  for (const AlgorithmInfo& row : algorithms()) {
    if (row.collective != collective || !is_candidate(row.name)) continue;
    const std::vector<Program> programs = lower(row.generate(topology.num_ranks, root));
    for (const bool low_latency : {true, false}) {
      if (low_latency && nbytes > kMaxLowLatencyBytes) continue;
      const LinkCost cost = low_latency ? topology.ll : topology.simple;
      SimulateOptions options;
      // A long message is so many equal tiles: four of them show the steady state.
      options.tile_bytes =
          kSlotBytes * programs.front().num_chunks / std::max(programs.front().max_range, 1);
      options.nbytes = std::min(nbytes, 4 * options.tile_bytes);
      options.cost = [&cost](int, int) { return cost; };
      const double scale = options.nbytes == 0
                               ? 1.0
                               : static_cast<double>(nbytes) / static_cast<double>(options.nbytes);
      candidates.push_back(
          {std::string(row.name), low_latency, simulate(programs, options).time_s * scale});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.predicted_s < b.predicted_s; });
  return candidates;
}

}  // namespace pycoll
