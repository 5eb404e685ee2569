// Copies of data that another core reads next.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/pages.h"

namespace pycoll {

/// Whether string moves are fast on this CPU (FSRM and AVX-512) and the build may use them:
/// sanitizers do not see them.
extern const bool kStringMoves;

/// The size from which a string move is worth its start-up time.
inline constexpr size_t kMinStringMoveBytes = 1024;
/// And for data that another core has written.
inline constexpr size_t kMinStringReadBytes = 128 << 10;

/// Whether a string move from `src` to `dst` is worth more than vectors. If the destination is a
/// few bytes past the source, modulo a page, it takes up to 14 times as long (decision 0136).
[[gnu::always_inline]] inline bool pays_to_move_strings(const void* dst, const void* src) {
  constexpr uintptr_t kFewBytes = 64;
  const uintptr_t past =
      (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(src)) % kPage;
  return kStringMoves && (past == 0 || past >= kFewBytes);
}

/// Copies with `rep movsb`, which writes whole lines without first fetching the other core's data.
/// Between cores that share no cache it takes half the time of vector stores; between cores that
/// do, the same time. Requires kStringMoves, and pays only where pays_to_move_strings().
[[gnu::always_inline]] inline void string_move(void* dst, const void* src, size_t nbytes) {
#ifdef __x86_64__
  __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(nbytes) : : "memory");
#else
  __builtin_memcpy(dst, src, nbytes);
#endif
}

}  // namespace pycoll
