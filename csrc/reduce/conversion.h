// Conversion between the stored form of an element and the form for arithmetic: load() and store(),
// for scalars and for vectors of them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "reduce/dtypes.h"
#include "reduce/lanes.h"

namespace pycoll {

/// Conversion between a dtype's storage and its accumulator: the identity except for small floats
/// and bools.
/// store() takes the result of finish(), in which every NaN is canonical.
template <DType dtype>
struct Conversion {
  template <class L>
  static PYCOLL_LANE_FN L load(L x) {
    return x;
  }
  template <class L>
  static PYCOLL_LANE_FN L store(L x) {
    return x;
  }
};

template <>
struct Conversion<DType::kBF16> {
  template <class L>
  static PYCOLL_LANE_FN WithLane<float, L> load(L bits) {
    return bits_as<WithLane<float, L>>(convert_lanes<uint32_t>(bits) << 16);
  }
  template <class F>
  static PYCOLL_LANE_FN WithLane<uint16_t, F> store(F x) {
    return convert_lanes<uint16_t>(round(x));
  }
  template <class F>
  static PYCOLL_LANE_FN Bits<F> round(F x) {
    return rounded_in_place(x) >> 16;
  }

  // Two stored elements share 32 bits, and each becomes an f32 there: this takes half as long as
  // the conversion of lanes in their order, which moves each lane to another place.

  /// Loads the elements with even index and those with odd index.
  template <class F>
  static PYCOLL_LANE_FN void load_pair(Bits<F> pairs, F& even, F& odd) {
    even = bits_as<F>(pairs << 16);
    odd = bits_as<F>(pairs & 0xffff0000u);
  }
  template <class F>
  static PYCOLL_LANE_FN Bits<F> store_pair(F even, F odd) {
    return rounded_in_place(even) >> 16 | (rounded_in_place(odd) & 0xffff0000u);
  }

 private:
  /// Rounds to nearest even: adds just under half of the last kept place, one more if that is odd.
  /// The result is in the high half.
  template <class F>
  static PYCOLL_LANE_FN Bits<F> rounded_in_place(F x) {
    const Bits<F> bits = bits_as<Bits<F>>(x);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

/// Whether the elements of two accumulators are converted together (load_pair, store_pair).
template <class Traits, class F>
concept ConvertsPairs = requires(F x) { Traits::load_pair(Bits<F>{}, x, x); };

/// Floats of 8 or 16 bits with subnormals. The highest exponent means infinity and NaN; in dtypes
/// without infinities it is an ordinary exponent, and only the code of all ones is NaN.
/// Never computes with an f32 subnormal, so that flush-to-zero modes do not change the result.
template <Scalar Stored, uint32_t mantissa_bits, uint32_t bias, bool has_infinity>
struct SmallFloat {
  template <class L>
  static PYCOLL_LANE_FN WithLane<float, L> load(L stored) {
    using F = WithLane<float, L>;
    using U = WithLane<uint32_t, L>;
    const U bits = convert_lanes<uint32_t>(stored);
    const U sign = (bits & kSign) << kSignShift;
    const U shifted = (bits & kAllOnes) << kShift;
    const U normal = shifted + ((127u - bias) << 23);
    // kUnit + a multiple of its last place is exact; subtracting kUnit leaves a subnormal's value.
    const F unit_plus = bits_as<F>((shifted >> kShift) + kUnitBits);
    const U subnormal = bits_as<U>(unit_plus - kUnit);
    const U finite = shifted < kMinNormal ? subnormal : normal;
    const U special = has_infinity ? shifted + ((255u << 23) - kInfinity) : U{} + 0x7fc00000u;
    return bits_as<F>((shifted < kFirstSpecial ? finite : special) | sign);
  }

  template <class F>
  static PYCOLL_LANE_FN WithLane<Stored, F> store(F x) {
    return convert_lanes<Stored>(round(x));
  }
  /// The code of the nearest value in 32 bits; of two equally near values, the even one.
  template <class F>
  static PYCOLL_LANE_FN Bits<F> round(F x) {
    using U = Bits<F>;
    const U bits = bits_as<U>(x);
    const U sign = (bits >> kSignShift) & kSign;
    const U magnitude = bits & 0x7fffffffu;
    // Changes the exponent's bias, then rounds to nearest even like bf16.
    const U normal = (magnitude - ((127u - bias) << 23) + ((1u << (kShift - 1)) - 1u) +
                      ((magnitude >> kShift) & 1u)) >>
                     kShift;
    // The last place of kUnit is that of a subnormal, so the addition rounds.
    const U subnormal = bits_as<U>(bits_as<F>(magnitude) + kUnit) - kUnitBits;
    const U finite = magnitude < kF32MinNormal ? subnormal : normal;
    // A finite value that overflows becomes infinity, or NaN without infinities (decision 0010).
    const U nan = U{} + (has_infinity ? kInfinityCode | kInfinityCode >> 1 : kAllOnes);
    const U special =
        magnitude > kF32Infinity ? nan : U{} + (has_infinity ? kInfinityCode : kAllOnes);
    return (magnitude < kF32Overflow ? finite : special) | sign;
  }

 protected:
  static constexpr uint32_t kShift = 23 - mantissa_bits;
  static constexpr uint32_t kSign = 1u << (8 * sizeof(Stored) - 1);
  static constexpr uint32_t kSignShift = 32 - 8 * sizeof(Stored);
  static constexpr uint32_t kAllOnes = kSign - 1;
  static constexpr uint32_t kInfinityCode = kAllOnes >> mantissa_bits << mantissa_bits;
  // The f32 whose last place is the smallest subnormal.
  static constexpr uint32_t kUnitBits = (127 + 24 - bias - mantissa_bits) << 23;
  static constexpr float kUnit = __builtin_bit_cast(float, kUnitBits);
  // Codes, shifted to their place in an f32.
  static constexpr uint32_t kMinNormal = 1u << 23;
  static constexpr uint32_t kInfinity = kInfinityCode << kShift;
  static constexpr uint32_t kFirstSpecial = has_infinity ? kInfinity : kAllOnes << kShift;
  // Values, as the bits of an f32.
  static constexpr uint32_t kF32MinNormal = (127 + 1 - bias) << 23;
  static constexpr uint32_t kF32Infinity = 255u << 23;
  static constexpr uint32_t kLargest = ((kAllOnes - 1) << kShift) + ((127 - bias) << 23);
  static constexpr uint32_t kF32Overflow =
      has_infinity ? (127 + 1 + bias) << 23 : kLargest + (1u << (kShift - 1)) + 1;
};

template <>
struct Conversion<DType::kF16> : SmallFloat<uint16_t, 10, 15, true> {};
template <>
struct Conversion<DType::kF8E4M3> : SmallFloat<uint8_t, 3, 7, false> {};
template <>
struct Conversion<DType::kF8E5M2> : SmallFloat<uint8_t, 2, 15, true> {};

/// Every byte other than 0 is true; results are 0 or 1.
template <>
struct Conversion<DType::kBool> {
  template <class L>
  static PYCOLL_LANE_FN L load(L x) {
    const L one = L(L{} + 1);
    return x > one ? one : x;
  }
  template <class L>
  static PYCOLL_LANE_FN L store(L x) {
    return x;
  }
};

template <DType dtype>
struct DTypeTraits;
#define X(id, name, kind, type, acc)                             \
  template <>                                                    \
  struct DTypeTraits<DType::id> : public Conversion<DType::id> { \
    using Storage = type;                                        \
    using Acc = acc;                                             \
  };
PYCOLL_FOR_EACH_DTYPE(X)
#undef X

}  // namespace pycoll
