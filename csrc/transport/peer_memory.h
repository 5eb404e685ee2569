// Reading another rank's own memory, where the system allows it: one copy instead of two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycoll {

/// What a rank publishes so that others can find its memory, and can tell that they found it.
struct alignas(64) PeerMemoryAddress {
  uint64_t pid = 0;
  uint64_t token_address = 0;
  uint64_t token = 0;
};

class PeerMemory {
 public:
  /// `addresses` is shared by the ranks, one row each. `same_process`: ranks are threads.
  PeerMemory(PeerMemoryAddress* addresses, int rank, int num_ranks, bool same_process);
  PeerMemory(const PeerMemory&) = delete;

  /// Copies from the memory of `peer`, which has published its address before it said where.
  /// False when the system refuses, or the peer's process has ended.
  bool read(int peer, void* dst, uint64_t address, size_t nbytes);

 private:
  enum class Reach : uint8_t { kUnknown, kAllowed, kRefused };
  Reach probe(int peer) const;

  PeerMemoryAddress* addresses_;
  bool same_process_;
  uint64_t token_;
  std::vector<Reach> reach_;
};

}  // namespace pycoll
