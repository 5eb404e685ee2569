// Dtypes as array libraries describe them: NumPy by type number or name, the
// buffer protocol by a format and a size, DLPack by a code and a number of bits.
#pragma once

#include <cstddef>
#include <string_view>

#include "bindings/arguments/dlpack.h"
#include "reduce/dtypes.h"

namespace pycoll {

/// The dtype whose elements have this kind and size; floats are those of IEEE 754.
inline constexpr DType dtype_of(DTypeKind kind, size_t size) {
  if (kind == DTypeKind::kFloat && size == 1)
    return DType::kOpaque;  // there are several 8-bit formats
  for (int d = 0; d < kNumDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (dtype == DType::kBF16) continue;  // not an IEEE 754 type
    if (dtype_kind(dtype) == kind && dtype_size(dtype) == size) return dtype;
  }
  return DType::kOpaque;
}

/// NumPy's own types, by their NPY_TYPES number, which is part of its ABI.
inline constexpr DType dtype_of_numpy(int type_num) {
  using enum DTypeKind;
  constexpr DType kTypes[] = {
      DType::kBool,
      dtype_of(kInt, 1),
      dtype_of(kUInt, 1),
      dtype_of(kInt, sizeof(short)),
      dtype_of(kUInt, sizeof(short)),
      dtype_of(kInt, sizeof(int)),
      dtype_of(kUInt, sizeof(int)),
      dtype_of(kInt, sizeof(long)),
      dtype_of(kUInt, sizeof(long)),
      dtype_of(kInt, sizeof(long long)),
      dtype_of(kUInt, sizeof(long long)),
      DType::kF32,
      DType::kF64,
      DType::kOpaque,  // long double
      DType::kC64,
      DType::kC128,
      DType::kOpaque,  // complex long double
      DType::kOpaque,  // object
      DType::kOpaque,  // bytes
      DType::kOpaque,  // str
      DType::kOpaque,  // void
      DType::kOpaque,  // datetime64
      DType::kOpaque,  // timedelta64
      DType::kF16,
  };
  constexpr int kNumTypes = sizeof(kTypes) / sizeof(kTypes[0]);
  return type_num >= 0 && type_num < kNumTypes ? kTypes[type_num] : DType::kOpaque;
}

/// A type that a package adds to NumPy, by name: its number depends on the order of imports.
inline DType dtype_of_scalar_type(std::string_view name) {
  name.remove_prefix(name.rfind('.') + 1);  // npos + 1 is 0
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float8_e4m3fn") return DType::kF8E4M3;
  if (name == "float8_e5m2") return DType::kF8E5M2;
  return DType::kOpaque;
}

/// A format of Python's struct module, or of NumPy ("Zf"), in native order.
inline DType dtype_of_format(std::string_view format, size_t size) {
  constexpr bool kLittle = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
  if (!format.empty() &&
      (format[0] == '@' || format[0] == '=' || format[0] == (kLittle ? '<' : '>'))) {
    format.remove_prefix(1);
  }
  const bool is_complex = format.size() == 2 && format[0] == 'Z';
  if (is_complex) format.remove_prefix(1);
  if (format.size() != 1) return DType::kOpaque;
  constexpr std::string_view kFloats = "efd", kInts = "bhilqn", kUInts = "BHILQN";
  const auto is_in = [&](std::string_view formats) {
    return formats.find(format[0]) != formats.npos;
  };
  if (is_complex) return is_in("fd") ? dtype_of(DTypeKind::kComplex, size) : DType::kOpaque;
  if (is_in(kFloats)) return dtype_of(DTypeKind::kFloat, size);
  if (is_in(kInts)) return dtype_of(DTypeKind::kInt, size);
  if (is_in(kUInts)) return dtype_of(DTypeKind::kUInt, size);
  return format[0] == '?' && size == 1 ? DType::kBool : DType::kOpaque;
}

/// Bytes of one element; 0 when it is not a whole number of them.
inline size_t size_of_dlpack(const DLDataType& type) {
  const size_t bits = size_t{type.bits} * type.lanes;
  return bits % 8 == 0 ? bits / 8 : 0;
}

inline DType dtype_of_dlpack(const DLDataType& type) {
  if (type.lanes != 1) return DType::kOpaque;
  const size_t size = type.bits / 8u;
  switch (type.code) {
    case kDLInt:
      return dtype_of(DTypeKind::kInt, size);
    case kDLUInt:
      return dtype_of(DTypeKind::kUInt, size);
    case kDLFloat:
      return dtype_of(DTypeKind::kFloat, size);
    case kDLBfloat:
      return size == 2 ? DType::kBF16 : DType::kOpaque;
    case kDLComplex:
      return dtype_of(DTypeKind::kComplex, size);
    case kDLBool:
      return size == 1 ? DType::kBool : DType::kOpaque;
    case kDLFloat8_e4m3fn:
      return DType::kF8E4M3;
    case kDLFloat8_e5m2:
      return DType::kF8E5M2;
    default:
      return DType::kOpaque;
  }
}

}  // namespace pycoll
