#include "comm/tuning/online_tuning.h"

#include <algorithm>

namespace pycoll {
namespace {

// Another plan is better if it takes less than this part of the time.
constexpr double kMargin = 0.96;
// A plan that takes so many times the time of the best one has lost clearly.
constexpr double kClearLoss = 1.25;
// If the best plan takes so many times as long as in the trial before, or as little of it, the
// machine has changed, and earlier losses count no longer.
constexpr double kChange = 1.5;
// A pause has at least so many calls for each one that did not count in the trial before.
constexpr int kPausePerCall = 4;

}  // namespace

void OnlineTuning::warms_up(int plan, int num_calls) {
  plans_[static_cast<size_t>(plan)].calls_before = num_calls;
  if (plan == best_) calls_left_ = std::max(calls_left_, num_calls);
}

OnlineTuning::Turn OnlineTuning::next() {
  Turn turn;
  turn.follows = last_ends_;
  ended_side_ = side_;
  last_ends_ = false;
  // The last time of a trial is handed over by the call that follows it.
  if (num_calls_ == calls_of_trial() && !turn.follows) end_trial();
  if (num_calls_ < 0 && calls_left_-- == 0) begin_trial();
  turn.plan = best_;
  if (num_calls_ < 0 || num_calls_ == calls_of_trial()) return turn;
  const int of_best = pace_.num_spans * pace_.calls_of_span;
  side_ = num_calls_ < of_best ? 0 : 1;
  if (side_ == 1) turn.plan = other_;
  turn.begins = num_calls_ == of_best;
  const int counted = side_ == 0 ? num_calls_ : num_calls_ - of_best - calls_before();
  ++num_calls_;
  if (counted < 0) return turn;
  turn.timed = true;
  turn.starts = counted % pace_.calls_of_span == 0;
  turn.ends = last_ends_ = (counted + 1) % pace_.calls_of_span == 0;
  return turn;
}

void OnlineTuning::took(double ns_per_byte) {
  Times& times = times_[static_cast<size_t>(ended_side_)];
  if (times.num < pace_.num_spans) times.of_span[static_cast<size_t>(times.num++)] = ns_per_byte;
}

double OnlineTuning::median(int side) {
  Times& times = times_[static_cast<size_t>(side)];
  if (2 * times.num <= pace_.num_spans) return 0;
  std::sort(times.of_span.begin(), times.of_span.begin() + times.num);
  return times.of_span[static_cast<size_t>((times.num - 1) / 2)];
}

void OnlineTuning::begin_trial() {
  times_ = {};
  do {
    other_ = (other_ + 1) % num_plans_;
  } while (other_ == best_);
  int& skips_left = plans_[static_cast<size_t>(other_)].skips_left;
  if (skips_left > 0) {
    --skips_left;
    calls_left_ = pause_;
  } else {
    num_calls_ = 0;
  }
}

void OnlineTuning::end_trial() {
  num_calls_ = -1;
  Plan& best = plans_[static_cast<size_t>(best_)];
  Plan& other = plans_[static_cast<size_t>(other_)];
  const double of_best = median(0);
  const double of_other = median(1);
  const double before = best.ns_per_byte;
  const auto pause_for = [&](int num_calls) {
    pause_ = num_calls;
    calls_left_ = std::max(pause_, kPausePerCall * calls_before());
  };
  pause_for(std::min(2 * pause_, kMaxPause));
  if (of_best == 0 && of_other == 0) return;  // other arrays, which are not tuned
  if (of_other == 0) {
    other.skips = other.skips_left = kMaxSkipped;  // the system or the arrays do not allow it
    return;
  }
  other.ns_per_byte = of_other;
  if (of_best == 0) {
    best_ = other_;
    return;
  }
  best.ns_per_byte = of_best;
  if (before > 0 && (of_best > before * kChange || of_best * kChange < before)) {
    for (Plan& plan : plans_) plan.skips = plan.skips_left = 0;
    pause_for(std::max(pause_ / 8, pace_.min_pause));
  } else {
    other.skips = of_other < of_best * kClearLoss ? 0 : std::min(2 * other.skips + 1, kMaxSkipped);
    other.skips_left = other.skips;
  }
  if (of_other < of_best * kMargin) {
    best_ = other_;
    pause_for(pace_.min_pause);
  }
}

}  // namespace pycoll
