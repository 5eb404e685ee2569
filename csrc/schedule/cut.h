// The cut of a block's tile into pieces.
#pragma once

#include <cstdint>

#include "base/macros.h"

namespace pycoll {

/// First element of a piece in a block's tile of `count` elements that is cut into `num_chunks`
/// pieces: floor(c * count / num_chunks) for piece c. All code that cuts a tile uses this function.
PYCOLL_HD inline int64_t chunk_start(int64_t count, int32_t num_chunks, int64_t chunk) {
#ifdef __CUDA_ARCH__
  // Tiles on a device are small, and a 32-bit division takes a fifth of the time.
  const auto product = static_cast<uint64_t>(chunk) * static_cast<uint64_t>(count);
  const auto divisor = static_cast<uint32_t>(num_chunks);
  if (product >> 32 == 0) return static_cast<uint32_t>(product) / divisor;
  return static_cast<int64_t>(product / divisor);
#else
  int64_t product = 0;
  if (!__builtin_mul_overflow(chunk, count, &product)) return product / num_chunks;
  return static_cast<int64_t>(static_cast<__int128>(chunk) * count / num_chunks);
#endif
}

}  // namespace pycoll
