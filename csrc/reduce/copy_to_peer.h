// Copies what another core reads next.
#pragma once

#include <cstddef>

namespace pycoll {

/// Whether this CPU has fast string moves (FSRM) and they may be used: sanitizers do not see them.
extern const bool kStringMoves;

/// From this size on a string move's start pays.
inline constexpr size_t kMinStringMoveBytes = 1024;

/// Copies with `rep movsb`, which writes whole lines without first fetching what the other core
/// has in them: between cores that share no cache, half the time of vector stores; between those
/// that do, the same. Only where kStringMoves.
[[gnu::always_inline]] inline void string_move(void* dst, const void* src, size_t nbytes) {
#ifdef __x86_64__
  __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
#else
  __builtin_memcpy(dst, src, nbytes);
#endif
}

}  // namespace pycoll
