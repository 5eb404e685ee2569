// Cache hints. Nothing but time depends on them, and none of them faults, whatever the address.
#pragma once

namespace pycoll {

/// Brings the line here, to be read.
inline void prefetch_for_read(const void* line) { __builtin_prefetch(line, 0); }

/// Brings the line here and takes it from every other core, to be written. Without the hint a store
/// asks for ownership when it retires, and the few stores that may wait for it hold up all others.
inline void prefetch_for_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

}  // namespace pycoll
