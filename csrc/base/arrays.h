// Where the arrays of a call lie, as far as it decides how its bytes may travel.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace pycoll {

enum class Arrays : uint8_t {
  kPlain,   // anywhere: the others reach them, if at all, by the kernel
  kMapped,  // in memory that all ranks map, or in the one process of ranks that are threads
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
