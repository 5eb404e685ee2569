// Memory pages: their sizes in bytes, on x86-64 and arm64, and their allocation in advance.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace pycoll {

inline constexpr size_t kPage = 4096;
inline constexpr size_t kLargePage = size_t{2} << 20;

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Allocates the pages of this memory, so that later writes need not wait for the system. Changes
/// no content. Where it fails, writes wait.
inline void populate(std::byte* memory, size_t nbytes) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older libc headers lack
  const size_t past = reinterpret_cast<uintptr_t>(memory) % kPage;
  ::madvise(memory - past, past + nbytes, kPopulateWrite);
}

}  // namespace pycoll
