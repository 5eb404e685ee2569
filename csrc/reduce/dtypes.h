// THE dtype table. A new dtype is one row: its name, its C++ type, the type it is accumulated in.
// PYCOLL_FOR_EACH_DTYPE(X) calls X(enumerator, name, storage type, accumulator type).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace pycoll {

// 16-bit floats are stored as their bits: element.h converts them to f32 and rounds them back.
#define PYCOLL_FOR_EACH_DTYPE(X)    \
  X(kF32, "f32", float, float)      \
  X(kF64, "f64", double, double)    \
  X(kF16, "f16", uint16_t, float)   \
  X(kBF16, "bf16", uint16_t, float) \
  X(kI32, "i32", int32_t, int32_t)  \
  X(kI64, "i64", int64_t, int64_t)  \
  X(kU8, "u8", uint8_t, uint8_t)

enum class DType : uint8_t {
#define X(id, name, type, acc) id,
  PYCOLL_FOR_EACH_DTYPE(X)
#undef X
};

#define X(id, name, type, acc) +1
inline constexpr int kNumDTypes = 0 PYCOLL_FOR_EACH_DTYPE(X);
#undef X

inline constexpr size_t dtype_size(DType dtype) {
  constexpr size_t sizes[] = {
#define X(id, name, type, acc) sizeof(type),
      PYCOLL_FOR_EACH_DTYPE(X)
#undef X
  };
  return sizes[static_cast<size_t>(dtype)];
}

inline constexpr std::string_view dtype_name(DType dtype) {
  constexpr std::string_view names[] = {
#define X(id, name, type, acc) name,
      PYCOLL_FOR_EACH_DTYPE(X)
#undef X
  };
  return names[static_cast<size_t>(dtype)];
}

/// The dtype of this name, or nothing.
inline constexpr std::optional<DType> find_dtype(std::string_view name) {
  for (int d = 0; d < kNumDTypes; ++d) {
    if (dtype_name(static_cast<DType>(d)) == name) return static_cast<DType>(d);
  }
  return std::nullopt;
}

}  // namespace pycoll
