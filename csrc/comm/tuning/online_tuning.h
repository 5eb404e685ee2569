// Tuning while a program runs: now and then the plan that is in use competes with another one, and
// the faster of the two is used from then on.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace pycoll {

/// Decides which of a few plans each call runs, from the times of earlier calls (decision 0116).
/// All ranks make the same calls and hand over the same times, so all decide the same.
///
/// In a trial, some spans of calls run the best plan so far, and as many run another one. If that
/// one seems faster, the best plan runs once more: a pause of the program before its first spans
/// may have emptied the caches (decision 0132). The first calls after a change of plan do not
/// count: each plan leaves arrays and slots in other caches. Medians are compared, since the kernel
/// interrupts some calls. Between trials, all calls run the best plan. The other plans take turns
/// in trials, and one that has lost clearly skips some.
class OnlineTuning {
 public:
  struct Pace {
    int num_spans = 5;  // of each part of a trial; at most kMaxSpans
    int calls_of_span = 1;
    int calls_before = 2;  // after a change of plan, which do not count
    // Calls before the first trial. The pause is twice as long after each trial that changes
    // nothing.
    int min_pause = 16;
  };
  static constexpr int kMaxPlans = 9;
  static constexpr int kMaxSpans = 5;
  // The most calls between two trials.
  static constexpr int kMaxPause = 256;
  // Trials that a plan skips at most.
  static constexpr int kMaxSkipped = 15;

  struct Turn {
    int plan = 0;
    bool begins = false;   // the call is the first one of another plan in a trial
    bool timed = false;    // the call is part of a span
    bool starts = false;   // it is the first call of a span
    bool ends = false;     // it is the last one
    bool follows = false;  // it follows the end of a span, whose time can be handed over
  };

  /// With one plan or none there is nothing to tune. The first one is expected to be the best.
  OnlineTuning() = default;
  OnlineTuning(int num_plans, const Pace& pace)
      : num_plans_(num_plans), pace_(pace), pause_(pace.min_pause), calls_left_(pace.min_pause) {}
  bool is_on() const { return num_plans_ > 1; }
  /// Before the first call: so many calls of this plan do not count, more than those of the pace.
  void warms_up(int plan, int num_calls);

  /// Begins the next call.
  Turn next();
  /// Hands over the time of the last span, per byte. A span whose time is not handed over does not
  /// count.
  void took(double ns_per_byte);

  /// The plan of calls between trials.
  int best() const { return best_; }
  /// The plan's time in its last trial; 0: none yet.
  double ns_per_byte(int plan) const { return plans_[static_cast<size_t>(plan)].ns_per_byte; }

 private:
  struct Plan {
    double ns_per_byte = 0;
    int calls_before = 0;  // as in Pace, if there are more
    int skips = 0;         // trials to skip after its last clear loss
    int skips_left = 0;
  };
  struct Times {
    std::array<double, kMaxSpans> of_span{};
    int num = 0;
  };

  // Parts of a trial. A plan's last time is handed over by the call after it.
  enum class Part : uint8_t { kNone, kBest, kOther, kBestAgain, kOver };

  /// Calls at the beginning of a part that do not count.
  int calls_before(Part part) const;
  int calls_of(Part part) const;
  void begin_next_part();
  void begin_trial();
  void end_trial();
  /// The median of a part's spans; 0: most of them have handed over no time.
  double median(Part part);
  /// Whether the other plan was the faster one in its part.
  bool seems_better();

  int num_plans_ = 0;
  Pace pace_;
  std::array<Plan, kMaxPlans> plans_;
  int best_ = 0;
  int other_ = 0;               // plan of this trial or the last one
  std::array<Times, 5> times_;  // of each part
  int pause_ = 0;
  int calls_left_ = 0;  // until the next trial
  Part part_ = Part::kNone;
  int num_calls_ = 0;              // of this part
  bool last_ends_ = false;         // the last call ended a span
  Part ended_part_ = Part::kNone;  // of the span whose time can be handed over
};

}  // namespace pycoll
