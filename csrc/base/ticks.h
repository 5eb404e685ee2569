// A clock that takes a few nanoseconds to read and is common to all processes of a host: x86's time
// stamp counter where the CPU guarantees that it never stops and has a constant rate, else
// CLOCK_MONOTONIC. Ticks are converted to nanoseconds only when a record is read.
#pragma once

#include <cstdint>

#include "base/clock.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace pycoll {

/// Whether read_ticks may use the counter; identical for all processes of a host.
inline bool has_steady_counter() {
#if defined(__x86_64__)
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  constexpr unsigned kInvariantTsc = 1u << 8;
  return __get_cpuid(0x80000007u, &a, &b, &c, &d) != 0 && (d & kInvariantTsc) != 0;
#else
  return false;
#endif
}

inline uint64_t read_ticks(bool steady_counter) {
#if defined(__x86_64__)
  if (steady_counter) return __rdtsc();
#endif
  (void)steady_counter;
  return static_cast<uint64_t>(now_ns());
}

/// One moment, read on both clocks.
struct TickMoment {
  uint64_t ticks = 0;
  int64_t ns = 0;

  static TickMoment now(bool steady_counter) {
    const int64_t before = now_ns();
    const uint64_t ticks = read_ticks(steady_counter);
    return {ticks, before + (now_ns() - before) / 2};
  }
};

/// Converts ticks to nanoseconds of CLOCK_MONOTONIC, from two moments. Between the two, the error
/// is at most that of the moments, however close they are, so no wait for calibration is needed.
class TickScale {
 public:
  TickScale(const TickMoment& first, const TickMoment& last)
      : first_(first),
        ns_per_tick_(last.ticks > first.ticks ? static_cast<double>(last.ns - first.ns) /
                                                    static_cast<double>(last.ticks - first.ticks)
                                              : 0) {}
  int64_t to_ns(uint64_t ticks) const {
    const auto since = static_cast<int64_t>(ticks - first_.ticks);
    return first_.ns + static_cast<int64_t>(static_cast<double>(since) * ns_per_tick_);
  }

 private:
  TickMoment first_;
  double ns_per_tick_;
};

}  // namespace pycoll
