// THE dtype table. A new dtype is one row: its name, the kind of its elements, its C++ type, and
// the type of its accumulator. PYCOLL_FOR_EACH_DTYPE(X) calls X(enumerator, name, kind, storage
// type, accumulator type).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace pycoll {

/// A complex number: two numbers, one after the other in memory.
template <class T>
struct Complex {
  T re;
  T im;
};

/// The kind of a dtype's elements, which decides which ops are valid (cells.h).
enum class DTypeKind : uint8_t { kFloat, kInt, kUInt, kBool, kComplex };

// 16- and 8-bit floats are stored as their bits: element.h converts them to f32 and rounds them
// back. f8_e4m3 is the variant without infinities (e4m3fn): NaN is 0x7f and 0xff, 448 the largest.
#define PYCOLL_FOR_EACH_DTYPE(X)                           \
  X(kF32, "f32", kFloat, float, float)                     \
  X(kF64, "f64", kFloat, double, double)                   \
  X(kF16, "f16", kFloat, uint16_t, float)                  \
  X(kBF16, "bf16", kFloat, uint16_t, float)                \
  X(kF8E4M3, "f8_e4m3", kFloat, uint8_t, float)            \
  X(kF8E5M2, "f8_e5m2", kFloat, uint8_t, float)            \
  X(kI8, "i8", kInt, int8_t, int8_t)                       \
  X(kI16, "i16", kInt, int16_t, int16_t)                   \
  X(kI32, "i32", kInt, int32_t, int32_t)                   \
  X(kI64, "i64", kInt, int64_t, int64_t)                   \
  X(kU8, "u8", kUInt, uint8_t, uint8_t)                    \
  X(kU16, "u16", kUInt, uint16_t, uint16_t)                \
  X(kU32, "u32", kUInt, uint32_t, uint32_t)                \
  X(kU64, "u64", kUInt, uint64_t, uint64_t)                \
  X(kBool, "bool", kBool, uint8_t, uint8_t)                \
  X(kC64, "c64", kComplex, Complex<float>, Complex<float>) \
  X(kC128, "c128", kComplex, Complex<double>, Complex<double>)

enum class DType : uint8_t {
#define X(id, name, kind, type, acc) id,
  PYCOLL_FOR_EACH_DTYPE(X)
#undef X
  // Not a row: elements of any other type, which can be copied but not reduced. Only the caller
  // (ArrayView, Call) knows their size.
  kOpaque,
};

inline constexpr int kNumDTypes = static_cast<int>(DType::kOpaque);

/// Bytes of one element; 0 for kOpaque.
inline constexpr size_t dtype_size(DType dtype) {
  constexpr size_t sizes[] = {
#define X(id, name, kind, type, acc) sizeof(type),
      PYCOLL_FOR_EACH_DTYPE(X)
#undef X
          0,
  };
  return sizes[static_cast<size_t>(dtype)];
}

inline constexpr std::string_view dtype_name(DType dtype) {
  constexpr std::string_view names[] = {
#define X(id, name, kind, type, acc) name,
      PYCOLL_FOR_EACH_DTYPE(X)
#undef X
          "opaque",
  };
  return names[static_cast<size_t>(dtype)];
}

/// The kind of a dtype other than kOpaque.
inline constexpr DTypeKind dtype_kind(DType dtype) {
  constexpr DTypeKind kinds[] = {
#define X(id, name, kind, type, acc) DTypeKind::kind,
      PYCOLL_FOR_EACH_DTYPE(X)
#undef X
  };
  return kinds[static_cast<size_t>(dtype)];
}

/// The dtype with this name, or nothing.
inline constexpr std::optional<DType> find_dtype(std::string_view name) {
  for (int d = 0; d < kNumDTypes; ++d) {
    if (dtype_name(static_cast<DType>(d)) == name) return static_cast<DType>(d);
  }
  return std::nullopt;
}

}  // namespace pycoll
