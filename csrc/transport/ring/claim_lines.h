// How a reader makes cache lines its own, so that their owner's next write of them is fast.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/ring/slot.h"

namespace pycoll {

/// Writes a word of each line of these bytes as it is. A line that a core has written is in its
/// cache alone, and another core takes it from there in one transfer. A line that it has only read
/// is in two caches, and the other core's write takes three to five times as long (decision 0113).
/// Call it after the reads, and while no other rank may read or write the bytes.
inline void claim_lines(std::byte* bytes, size_t nbytes) {
  constexpr uintptr_t kLine = 64;
  constexpr uintptr_t kWord = sizeof(uint64_t);
  const auto begin = reinterpret_cast<uintptr_t>(bytes);
  // The words at both ends may be partly in other arrays, which are left alone.
  uintptr_t at = (begin + kWord - 1) / kWord * kWord;
  for (; at + kWord <= begin + nbytes; at = (at / kLine + 1) * kLine) {
    auto& word = *reinterpret_cast<uint64_t*>(at);
    store_relaxed(word, load_relaxed(word));
  }
}

}  // namespace pycoll
