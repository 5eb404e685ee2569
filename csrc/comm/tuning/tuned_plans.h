// The plans that calls of one kind try, with the clock of their turns.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "comm/tuning/online_tuning.h"
#include "executor/cpu/buffer_exchange.h"

namespace pycoll {

struct PlannedCall;

/// A plan for plain arrays, and how it reaches those of the peers.
struct TunedPlan {
  PlannedCall* planned = nullptr;
  // kNone: through slots; kMapped: the arrays are copied to mapped memory; kProcess: by the kernel.
  Reach reach = Reach::kNone;
  int calls_before = 0;  // so many calls after other plans take longer than later ones
};

/// A call is begin(), heard() once the ranks have exchanged their times, starts_work() if it uses
/// slots, and end().
class TunedPlans {
 public:
  /// Nothing is tuned.
  TunedPlans() = default;
  /// `plans`: the one that is expected to be best first.
  TunedPlans(std::vector<TunedPlan> plans, const OnlineTuning::Pace& pace)
      : plans_(std::move(plans)), tuning_(static_cast<int>(plans_.size()), pace) {
    for (size_t i = 0; i < plans_.size(); ++i) {
      tuning_.warms_up(static_cast<int>(i), plans_[i].calls_before);
    }
  }

  bool is_on() const { return tuning_.is_on(); }
  const std::vector<TunedPlan>& plans() const { return plans_; }
  /// The plan of most calls.
  const TunedPlan& best() const { return plans_[static_cast<size_t>(tuning_.best())]; }
  /// Time of the i-th plan when it was tried last; 0: not yet.
  double ns_per_byte(size_t i) const { return tuning_.ns_per_byte(static_cast<int>(i)); }

  void begin(int64_t nbytes) {
    turn_ = tuning_.next();
    if (turn_.starts) {
      span_ = {{now_of_host(), 0}, nbytes, true};
    } else if (turn_.timed) {
      span_.nbytes += nbytes;
    }
  }
  const OnlineTuning::Turn& turn() const { return turn_; }
  /// The plan that this call is to run.
  const TunedPlan& wanted() const { return plans_[static_cast<size_t>(turn_.plan)]; }
  /// Whether the ranks exchange times in this call. None may leave it before all have read them.
  bool exchanges_times() const { return turn_.starts || turn_.follows; }
  /// What this rank publishes.
  OperationTimes times() const { return turn_.follows ? ended_.times : OperationTimes{}; }
  /// The latest times of all ranks.
  void heard(const OperationTimes& latest) {
    if (!turn_.follows || latest.entered_ns == 0 || latest.left_ns <= latest.entered_ns) return;
    tuning_.took(static_cast<double>(latest.left_ns - latest.entered_ns) /
                 static_cast<double>(ended_.nbytes));
  }
  /// The ranks have waited for each other, which other calls through slots do not.
  void starts_work() {
    if (turn_.starts) span_.times.entered_ns = now_of_host();
  }
  /// This call does not run the wanted plan.
  void misses() { span_.counts = false; }
  void end() {
    if (!turn_.ends) return;
    if (span_.counts) span_.times.left_ns = now_of_host();
    ended_ = span_;
  }

 private:
  struct Span {
    OperationTimes times;
    int64_t nbytes = 0;
    bool counts = false;
  };

  static uint64_t now_of_host() { return static_cast<uint64_t>(now_ns()); }

  std::vector<TunedPlan> plans_;
  OnlineTuning tuning_;
  OnlineTuning::Turn turn_;
  Span span_;   // the current one
  Span ended_;  // the last one
};

}  // namespace pycoll
