// Planner::tune(): which plans the calls of one kind try.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/slot_bytes.h"
#include "comm/planner.h"

namespace pycoll {
namespace {

// Calls that take so long run few calls of other plans (decision 0132).
constexpr double kLongCallS = 3e-4;

OnlineTuning::Pace pace_of(const PlanKey& wanted, double predicted_s, bool tries_few) {
  OnlineTuning::Pace pace;
  const bool has_root = info(wanted.collective).has_root;
  if (tries_few || (!has_root && predicted_s > kLongCallS)) {
    pace.num_spans = 3;
    pace.calls_before = 1;
    pace.min_pause = 8;
  } else if (has_root) {
    pace.calls_of_span = 4;  // the root may leave a call before others enter it, so calls overlap
  }
  return pace;
}

/// Calls in which messages use all lines of their slots (decision 0108). Lines that no call has
/// used for a while have left the caches.
int calls_of_round(int64_t nbytes) {
  constexpr int64_t kMostCalls = 128;
  // Each rank sends at least half of the payload.
  return static_cast<int>(std::min(
      2 * static_cast<int64_t>(kBytesBetweenWrites) / std::max(nbytes, int64_t{1}), kMostCalls));
}

}  // namespace

std::vector<TunedPlan> Planner::plans_to_try(const PlanKey& wanted, Reach reach,
                                             const Ranking& ranking, int max_plans) {
  constexpr double kMaxTimes = 2;  // the predicted time of the best plan
  const bool sums_of_many = info(wanted.collective).has_op && num_ranks_ > 2;
  std::vector<TunedPlan> plans;
  double first_s = 0;
  double last_s = 0;
  for (const Candidate& candidate : ranking.candidates) {
    if (is_direct(candidate.protocol) != (reach != Reach::kNone)) continue;
    // Algorithms with equal times make the same moves, as several do with two ranks.
    if (candidate.predicted_s == last_s) continue;
    PlannedCall* const planned =
        reach == Reach::kNone
            ? &slots_plan(wanted, candidate.algorithm, candidate.protocol)
            : direct_plan(wanted, candidate.algorithm, candidate.protocol, writes_of(reach));
    if (planned == nullptr || planned->plan.order > wanted.order) continue;
    // Input and output share one copy.
    if (reach == Reach::kMapped && !planned->in_place_allowed) continue;
    // Which call runs which plan differs between runs. Their results must not.
    if (sums_of_many && planned->plan.order != Order::kFlat) continue;
    last_s = candidate.predicted_s;
    if (plans.empty()) first_s = last_s;
    if (last_s > kMaxTimes * first_s) break;
    plans.push_back({planned, reach});
    // Where bytes only go one way, no rank has lines of its own for its next message.
    if (info(wanted.collective).has_root && !info(wanted.collective).has_op && plans.size() == 1 &&
        max_plans > 1 && planned->protocol == ProtocolKind::kSimple) {
      plans.push_back({&slots_plan(wanted, candidate.algorithm, candidate.protocol,
                                   /*claims_few_slots=*/true),
                       reach});
    }
    if (static_cast<int>(plans.size()) == max_plans) break;
  }
  return plans;
}

TunedPlans Planner::tune(const PlanKey& wanted, const CallPlan& plan, const Ranking& plain,
                         const Ranking& mapped) {
  // Calls that take very long, and ranks that share cores, try one plan of each reach, soon.
  const double predicted_s = plain.candidates.front().predicted_s;
  const bool tries_few = predicted_s > 1e-3 || selector_.topology().oversubscribed();
  const int max_plans = tries_few ? 1 : 3;        // of each reach
  std::vector<std::pair<int, TunedPlan>> ranked;  // by place among those of its reach
  const PlannedCall* const chosen =
      plan.of(plan.copies_arrays ? Reach::kMapped : Reach::kProcess, true);
  bool has_chosen = false;
  const auto add = [&](Reach reach, const Ranking& ranking) {
    int place = 0;
    for (const TunedPlan& tuned : plans_to_try(wanted, reach, ranking, max_plans)) {
      const bool is_chosen = tuned.planned == chosen;
      has_chosen = has_chosen || is_chosen;
      ranked.push_back({is_chosen ? -1 : place, tuned});
      ++place;
    }
  };
  add(Reach::kNone, plain);
  if (plan.copies_arrays) add(Reach::kMapped, mapped);
  add(Reach::kProcess, plain);
  // The expected best one may sum in an order of its own. Then there is nothing to compare it with.
  if (!has_chosen) return {};
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<TunedPlan> plans;
  for (auto [place, tuned] : ranked) {
    if (!tries_few && tuned.reach == Reach::kNone && !tuned.planned->claims_few_slots)
      tuned.calls_before = calls_of_round(wanted.nbytes);
    plans.push_back(tuned);
  }
  return TunedPlans(std::move(plans), pace_of(wanted, predicted_s, tries_few));
}

}  // namespace pycoll
