// Checksums of PYCOLL_CHECK_DATA=1: they find bytes that memory or a network has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pycoll {

/// Two sums of the 8-byte words of some bytes (after Fletcher, 1982). A change within one word
/// always changes `words`. Other changes are missed with a probability of about 2^-64, unless they
/// are made to be missed: this is no protection from an attacker.
struct Checksum {
  uint64_t words = 0;   // each word counts once
  uint64_t places = 0;  // each word counts by its place, so that words that change places are found

  friend bool operator==(const Checksum&, const Checksum&) = default;
  static Checksum of(const std::byte* data, size_t nbytes);
};

inline constexpr size_t kChecksumBytes = sizeof(Checksum);

/// Writes the checksum of `nbytes` behind them.
inline void seal(std::byte* data, size_t nbytes) {
  const Checksum sum = Checksum::of(data, nbytes);
  std::memcpy(data + nbytes, &sum, sizeof(sum));
}

/// Whether the bytes still have the checksum that seal() has written behind them.
inline bool is_intact(const std::byte* data, size_t nbytes) {
  Checksum sum;
  std::memcpy(&sum, data + nbytes, sizeof(sum));
  return sum == Checksum::of(data, nbytes);
}

}  // namespace pycoll
