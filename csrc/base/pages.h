// Sizes of memory pages in bytes, on x86-64 and arm64.
#pragma once

#include <cstddef>

namespace pycoll {

inline constexpr size_t kPage = 4096;
inline constexpr size_t kLargePage = size_t{2} << 20;

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace pycoll
