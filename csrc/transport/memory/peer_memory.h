// Reads another rank's private memory where the system allows it: one copy instead of two.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycoll {

class Transport;

/// A token that a rank publishes so that peers can verify that they read its memory.
struct alignas(64) PeerMemoryAddress {
  uint64_t token_address = 0;
  uint64_t token = 0;
};

/// One per rank and communicator. Any thread may call it.
class PeerMemory {
 public:
  /// Publishes this rank's token.
  explicit PeerMemory(Transport& transport);
  PeerMemory(const PeerMemory&) = delete;

  /// Whether the system lets this rank read the memory of `peer`. Tries once, by reading the peer's
  /// token, and caches the result. The peer must have joined.
  bool reaches(int peer);

  /// Copies from the memory of `peer`. False if the system refuses or the peer's process has ended.
  bool read(int peer, void* dst, uint64_t address, size_t nbytes);

 private:
  enum class Reach : uint8_t { kUnknown, kAllowed, kRefused };
  Reach probe(int peer) const;

  Transport& transport_;
  const PeerMemoryAddress* addresses_;  // shared by the ranks, one row each
  uint64_t token_ = 0;
  std::vector<std::atomic<Reach>> reach_;  // by rank
};

}  // namespace pycoll
