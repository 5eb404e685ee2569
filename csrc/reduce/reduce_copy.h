// reduce_copy: the arithmetic of the program's only instruction, dsts <- reduce(srcs), in one pass
// over memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/peer_stores.h"
#include "reduce/dtypes.h"
#include "reduce/ops.h"

namespace pycoll {

/// Operands of one call. Sources are combined from left to right in their order here (the caller
/// passes rank order): ((s0 . s1) . s2) ..., with 16- and 8-bit floats in f32 and rounded once at
/// the end.
/// A destination may be the same memory as a source (exactly, not shifted); no other overlap is
/// allowed. Nothing needs to be aligned. A copy keeps every bit; a NaN that arithmetic produces is
/// the canonical one.
struct ReduceCopyArgs {
  const void* const* srcs;
  int num_srcs;  // >= 1; with 1 it is a copy (or a division, with divisor > 1)
  void* const* dsts;
  int num_dsts;  // >= 1
  size_t count;  // elements
  int64_t
      divisor;  // 1: no division. Otherwise divides the results before rounding (avg, final step)
  int num_streaming;  // so many of the first dsts are large and not read soon: non-temporal stores
                      // are allowed there
  int first_to_peer = num_dsts;  // another core reads the destinations from this one on next
  PeerStores* const* peer_stores = nullptr;  // of these; null: through the caches
  // Lines of sources that peers have just written, which are in other caches, are fetched so many
  // bytes before they are used. 0: not at all, which is faster for lines of the own cache.
  size_t read_ahead = 0;

  [[gnu::always_inline]] PeerStores* stores_of(int dst) const {
    return peer_stores == nullptr ? nullptr : peer_stores[dst - first_to_peer];
  }
};

/// Hardware prefetchers stop at page borders and fetch few lines from other cores (decision 0123).
inline constexpr size_t kReadAhead = 2048;

using ReduceCopyFn = void (*)(const ReduceCopyArgs& args);

/// The function for this dtype and op on this CPU, chosen once (AVX-512, AVX2, generic).
/// PYCOLL_ISA=generic|avx2|avx512 in the environment lowers the choice.
/// Raises UsageError when the op is not valid for the dtype (cells.h).
ReduceCopyFn reduce_copy_fn(DType dtype, Op op);

/// dst[i] <- src[i] * factor, in the accumulator type, rounded once. dst may be equal to src.
using ScaleFn = void (*)(void* dst, const void* src, size_t count, double factor);

/// The scaling step of premul on this CPU, for a factor that check_premul_factor() accepts. Complex
/// elements are multiplied by a real factor; integers wrap.
/// Raises UsageError when the dtype cannot be scaled.
ScaleFn scale_fn(DType dtype);

/// Name of the instruction set in use: "avx512", "avx2" or "generic".
const char* reduce_copy_isa();

/// dst <- src for any bytes, with the same kernels; streaming: non-temporal stores are allowed.
void copy_bytes(void* dst, const void* src, size_t nbytes, bool streaming);
/// Like copy_bytes(), for a src that another core has written, or a rank's own block: string moves
/// if it is long.
void copy_from_peer(void* dst, const void* src, size_t nbytes, bool streaming);
/// Like copy_bytes(), for a dst that another core reads next. `stores`: null is through the caches.
void copy_to_peer(void* dst, const void* src, size_t nbytes, PeerStores* stores);

}  // namespace pycoll
