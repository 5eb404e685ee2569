// Bits of a mask, on hosts and devices. These replace the functions of <bit>: nvcc accepts those in
// device code without a warning, but generates no code for them.
#pragma once

#include <bit>
#include <cstdint>

#include "base/macros.h"

namespace pycoll {

PYCOLL_HD inline int count_bits(uint64_t mask) {
#ifdef __CUDA_ARCH__
  return __popcll(mask);
#else
  return std::popcount(mask);
#endif
}

/// Position of the lowest set bit. The mask must not be 0.
PYCOLL_HD inline int lowest_bit(uint64_t mask) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(mask)) - 1;
#else
  return std::countr_zero(mask);
#endif
}

}  // namespace pycoll
