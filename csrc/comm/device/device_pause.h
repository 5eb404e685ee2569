// Pauses of a thread that waits for an operation of a device.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "base/clock.h"

namespace pycoll {

/// The time between two looks. Small operations take about 10 us, and a sleep takes 50 us and more:
/// the thread sleeps only after it has waited for a while.
class DevicePause {
 public:
  void once() {
    const int64_t now = now_ns();
    if (began_ns_ == 0) began_ns_ = now;
    if (now - began_ns_ < kSpinNs) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  static constexpr int64_t kSpinNs = 200'000;

  int64_t began_ns_ = 0;
};

}  // namespace pycoll
