// Monotonic time and deadlines. Units are in the names: nanoseconds inside, seconds at the API.
#pragma once

#include <chrono>
#include <cstdint>

namespace pycoll {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// A point in time after which waiting is an error.
class Deadline {
 public:
  static Deadline after_s(double timeout_s) {
    return Deadline(now_ns() + static_cast<int64_t>(timeout_s * 1e9), timeout_s);
  }
  bool expired() const { return now_ns() >= at_ns_; }
  int64_t remaining_ns() const { return at_ns_ - now_ns(); }
  /// The timeout this deadline was made from, for messages.
  double timeout_s() const { return timeout_s_; }

 private:
  Deadline(int64_t at_ns, double timeout_s) : at_ns_(at_ns), timeout_s_(timeout_s) {}
  int64_t at_ns_;
  double timeout_s_;
};

}  // namespace pycoll
