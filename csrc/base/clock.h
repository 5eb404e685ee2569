// Monotonic time and deadlines. Units are in the names: nanoseconds inside, seconds at the API.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

namespace pycoll {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// A point in time after which waiting is an error.
class Deadline {
 public:
  /// Called every few milliseconds by a waiting thread: handles signals (Ctrl-C), looks for ranks
  /// that have ended. Throws to end the wait.
  using Interrupt = std::function<void()>;

  static Deadline after_s(double timeout_s, Interrupt interrupt = nullptr) {
    return Deadline(now_ns() + static_cast<int64_t>(timeout_s * 1e9), timeout_s,
                    std::move(interrupt));
  }
  /// The same deadline, whose waits also call `more`.
  Deadline with(Interrupt more) const {
    Interrupt both = [first = interrupt_, more = std::move(more)] {
      if (first) first();
      more();
    };
    return Deadline(at_ns_, timeout_s_, std::move(both));
  }
  bool expired() const { return now_ns() >= at_ns_; }
  int64_t remaining_ns() const { return at_ns_ - now_ns(); }
  /// The timeout this deadline was made from, for messages.
  double timeout_s() const { return timeout_s_; }
  /// A deadline with the same timeout that starts now.
  Deadline restarted() const { return after_s(timeout_s_, interrupt_); }
  /// A deadline `more_s` seconds later, with the same timeout.
  Deadline extended_s(double more_s) const {
    return Deadline(at_ns_ + static_cast<int64_t>(more_s * 1e9), timeout_s_, interrupt_);
  }
  /// Throws if a signal asks to stop waiting.
  void check_interrupt() const {
    if (interrupt_) interrupt_();
  }

 private:
  Deadline(int64_t at_ns, double timeout_s, Interrupt interrupt)
      : at_ns_(at_ns), timeout_s_(timeout_s), interrupt_(std::move(interrupt)) {}
  int64_t at_ns_;
  double timeout_s_;
  Interrupt interrupt_;
};

}  // namespace pycoll
