#include "base/checksum.h"

namespace pycoll {

Checksum Checksum::of(const std::byte* data, size_t nbytes) {
  // Independent lanes, which the compiler turns into vectors.
  constexpr size_t kLanes = 8;
  constexpr size_t kBlockBytes = kLanes * sizeof(uint64_t);
  uint64_t words[kLanes] = {};
  uint64_t places[kLanes] = {};
  for (size_t at = 0; at < nbytes; at += kBlockBytes) {
    uint64_t block[kLanes] = {};
    if (nbytes - at >= kBlockBytes) {
      std::memcpy(block, data + at, kBlockBytes);
    } else {
      std::memcpy(block, data + at, nbytes - at);
    }
    for (size_t lane = 0; lane < kLanes; ++lane) {
      words[lane] += block[lane];
      places[lane] += words[lane];
    }
  }
  // The length counts, too: zeros at the end are not nothing. Each lane has its own odd factor, so
  // that a change of one lane remains one, and lanes that change places are found.
  Checksum sum{nbytes, nbytes};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const uint64_t factor = 0x9e37'79b9'7f4a'7c15 * (2 * lane + 1);
    sum.words += factor * words[lane];
    sum.places += factor * places[lane];
  }
  return sum;
}

}  // namespace pycoll
