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

int OnlineTuning::calls_before(Part part) const {
  switch (part) {
    case Part::kOther:
      return std::max(pace_.calls_before, plans_[static_cast<size_t>(other_)].calls_before);
    case Part::kBestAgain:
      return pace_.calls_before;
    default:
      return 0;
  }
}

int OnlineTuning::calls_of(Part part) const {
  return part == Part::kOver ? 1 : calls_before(part) + pace_.num_spans * pace_.calls_of_span;
}

void OnlineTuning::begin_next_part() {
  if (part_ == Part::kOver) {
    end_trial();
    return;
  }
  part_ = static_cast<Part>(static_cast<int>(part_) + 1);
  num_calls_ = 0;
}

OnlineTuning::Turn OnlineTuning::next() {
  Turn turn;
  turn.follows = last_ends_;
  ended_part_ = part_;
  last_ends_ = false;
  if (part_ != Part::kNone && num_calls_ == calls_of(part_)) begin_next_part();
  // By now the last time of the other plan has been handed over.
  if (part_ == Part::kBestAgain && num_calls_ == 1 && !seems_better()) end_trial();
  if (part_ == Part::kNone && calls_left_-- == 0) begin_trial();
  turn.plan = part_ == Part::kOther ? other_ : best_;
  if (part_ == Part::kNone) return turn;
  turn.begins = part_ == Part::kOther && num_calls_ == 0;
  const int counted = num_calls_++ - calls_before(part_);
  if (counted < 0 || part_ == Part::kOver) return turn;
  turn.timed = true;
  turn.starts = counted % pace_.calls_of_span == 0;
  turn.ends = last_ends_ = (counted + 1) % pace_.calls_of_span == 0;
  return turn;
}

void OnlineTuning::took(double ns_per_byte) {
  Times& times = times_[static_cast<size_t>(ended_part_)];
  if (times.num < pace_.num_spans) times.of_span[static_cast<size_t>(times.num++)] = ns_per_byte;
}

double OnlineTuning::median(Part part) {
  Times& times = times_[static_cast<size_t>(part)];
  if (2 * times.num <= pace_.num_spans) return 0;
  std::sort(times.of_span.begin(), times.of_span.begin() + times.num);
  return times.of_span[static_cast<size_t>((times.num - 1) / 2)];
}

bool OnlineTuning::seems_better() {
  const double of_other = median(Part::kOther);
  return of_other > 0 && of_other < median(Part::kBest) * kMargin;
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
    part_ = Part::kBest;
    num_calls_ = 0;
  }
}

void OnlineTuning::end_trial() {
  part_ = Part::kNone;
  Plan& best = plans_[static_cast<size_t>(best_)];
  Plan& other = plans_[static_cast<size_t>(other_)];
  const double again = median(Part::kBestAgain);
  const double of_best = again > 0 ? std::min(median(Part::kBest), again) : median(Part::kBest);
  const double of_other = median(Part::kOther);
  const double before = best.ns_per_byte;
  const auto pause_for = [&](int num_calls) {
    pause_ = num_calls;
    calls_left_ = std::max(pause_, kPausePerCall * calls_before(Part::kOther));
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
