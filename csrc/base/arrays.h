// The kinds of memory of a call's arrays, which decide the protocols that can carry its bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace pycoll {

enum class Arrays : uint8_t {
  kPlain,   // anywhere: other ranks reach them through the kernel, if at all
  kMapped,  // in memory that all ranks map, or in the process that all ranks share as threads
};
inline constexpr int kNumArrays = 2;
inline constexpr Arrays kAllArrays[] = {Arrays::kPlain, Arrays::kMapped};

inline const char* arrays_name(Arrays arrays) {
  return arrays == Arrays::kMapped ? "mapped" : "plain";
}
inline std::optional<Arrays> find_arrays(std::string_view name) {
  for (const Arrays arrays : kAllArrays) {
    if (name == arrays_name(arrays)) return arrays;
  }
  return std::nullopt;
}

}  // namespace pycoll
