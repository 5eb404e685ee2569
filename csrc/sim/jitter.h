// Random delays that depend on the seed and on the delayed message or rank, not on the order of
// events: the same seed gives the same times.
#pragma once

#include <cmath>
#include <cstdint>

namespace pycoll {

struct Jitter {
  uint64_t seed = 0;
  double message_s = 0;  // mean delay of a message before it leaves
  double start_s = 0;    // mean delay of a rank before it enters

  /// A sample of an exponential distribution: memoryless, with a long tail.
  static double exponential(uint64_t seed, uint64_t stream, uint64_t idx, double mean_s) {
    const uint64_t bits = mix(mix(mix(seed) ^ stream) ^ idx);
    constexpr double kUlp = 1.0 / (uint64_t{1} << 53);
    return -mean_s * std::log((static_cast<double>(bits >> 11) + 0.5) * kUlp);
  }

  /// SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
  /// 2014.
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
};

}  // namespace pycoll
