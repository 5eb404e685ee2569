// A line of the host's ll protocol (executor/protocol.h): one cache line, so that its bytes and
// flag arrive together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll {

struct alignas(64) CpuLine {
  static constexpr size_t kPayloadBytes = 56;
  std::byte payload[kPayloadBytes];
  uint64_t flag;

  /// The flag for message `sequence` of a ring, in a call with this mark.
  static constexpr uint64_t flag_of(uint64_t sequence, uint32_t mark) {
    return (sequence & kSequenceMask) << 24 | (mark & kMarkMask);
  }
  static constexpr uint64_t kSequenceMask = (uint64_t{1} << 40) - 1;
  static constexpr uint64_t kMarkMask = 0xffffff;
};
static_assert(sizeof(CpuLine) == 64);

}  // namespace pycoll
