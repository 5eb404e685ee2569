// How a reader makes cache lines its own, so that their owner's next write of them is fast.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/ring/slot.h"

namespace pycoll {

/// Writes a word of each line of these bytes as it is. A line that a core has written is in its
/// cache alone, and another core takes it from there in one transfer. A line that it has only read
/// is in two caches, and the other core's write takes three to five times as long (decision 0113).
/// Call it when the bytes have been read, while nobody else reads or writes them.
inline void claim_lines(std::byte* bytes, size_t nbytes) {
  constexpr uintptr_t kLine = 64;
  constexpr uintptr_t kWord = sizeof(uint64_t);
  const auto begin = reinterpret_cast<uintptr_t>(bytes);
  // Only words that are wholly in the range: what is beside it belongs to somebody else.
  uintptr_t at = (begin + kWord - 1) / kWord * kWord;
  for (; at + kWord <= begin + nbytes; at = (at / kLine + 1) * kLine) {
    auto& word = *reinterpret_cast<uint64_t*>(at);
    store_relaxed(word, load_relaxed(word));
  }
}

}  // namespace pycoll
