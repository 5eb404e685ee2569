// Processes of this user that connected, and left before they said their rank. If all other ranks
// have come and one of these has ended, it was the missing rank.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "bootstrap/local/process_info.h"

namespace pycoll {

class SilentProcesses {
 public:
  struct Ended {
    pid_t pid;
    int signal;  // that ended it, or 0
  };

  /// Adds a process that has closed its connection.
  void add(pid_t pid) {
    if (leaving_.size() < kMax) leaving_.push_back({pid, now_ns() + kMayEndNs});
  }
  /// Whether one of them may end: it closes its sockets a moment before.
  bool may_end() const { return !leaving_.empty(); }
  /// Those that have ended.
  const std::vector<Ended>& ended() {
    std::erase_if(leaving_, [this](const Leaving& one) {
      const std::optional<int> signal = end_of(one.pid);
      if (signal && ended_.size() < kMax) ended_.push_back({one.pid, *signal});
      return signal || now_ns() >= one.until_ns;
    });
    return ended_;
  }

 private:
  static constexpr size_t kMax = 64;
  static constexpr int64_t kMayEndNs = 1'000'000'000;

  struct Leaving {
    pid_t pid;
    int64_t until_ns;  // then it is no dying rank
  };

  std::vector<Leaving> leaving_;
  std::vector<Ended> ended_;
};

}  // namespace pycoll
