// Cache hints. They affect time only, and never fault, whatever the address.
#pragma once

namespace pycoll {

/// Fetches the cache line for reading.
[[gnu::always_inline]] inline void prefetch_for_read(const void* line) {
  __builtin_prefetch(line, 0);
}

/// Fetches the cache line for writing and invalidates it on all other cores. Without the hint a
/// store asks for ownership when it retires, and the store buffer fills while a few stores wait.
inline void prefetch_for_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

}  // namespace pycoll
