// What one element goes through: load -> combine with the other sources -> finish -> store.
// Every target (SIMD host, ThreadBlock, CUDA) uses these functions, so that their bits agree.
//
//   Acc a = DTypeTraits<d>::load(s0[i]);
//   a = Combine<op>::apply(a, DTypeTraits<d>::load(s1[i]));
//   dst[i] = DTypeTraits<d>::store(finish(a, divisor));
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "reduce/dtypes.h"
#include "reduce/lanes.h"
#include "reduce/ops.h"

namespace pycoll {

/// Conversion between a dtype's storage and its accumulator; the identity but for 16-bit floats.
/// store() takes what finish() returned: a NaN is the canonical one.
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
  /// To nearest even: adds just under half of the last place kept, and one more if that is odd.
  template <class F>
  static PYCOLL_LANE_FN Bits<F> round(F x) {
    const Bits<F> bits = bits_as<Bits<F>>(x);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
};

/// Never computes with an f32 subnormal, so that flush-to-zero modes do not change the result.
template <>
struct Conversion<DType::kF16> {
  template <class L>
  static PYCOLL_LANE_FN WithLane<float, L> load(L half) {
    using F = WithLane<float, L>;
    using U = WithLane<uint32_t, L>;
    const U sign = (convert_lanes<uint32_t>(half) & 0x8000u) << 16;
    const U shifted = (convert_lanes<uint32_t>(half) & 0x7fffu) << 13;
    const U normal = shifted + ((127u - 15u) << 23);
    const U inf_or_nan = shifted + ((255u - 31u) << 23);
    // 0.5 + mantissa * 2^-24 is exact: taking the 0.5 away leaves a subnormal's value.
    const F half_plus = bits_as<F>((shifted >> 13) + kHalfBits);
    const U subnormal = bits_as<U>(half_plus - 0.5f);
    const U finite = shifted < kF16MinNormal ? subnormal : normal;
    return bits_as<F>((shifted < kF16Inf ? finite : inf_or_nan) | sign);
  }

  template <class F>
  static PYCOLL_LANE_FN WithLane<uint16_t, F> store(F x) {
    using U = Bits<F>;
    const U bits = bits_as<U>(x);
    const U sign = (bits >> 16) & 0x8000u;
    const U magnitude = bits & 0x7fffffffu;
    // The exponent's bias changes by 112; then as for bf16, to nearest even.
    const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // The last place of 0.5 is 2^-24, that of a subnormal f16: the addition rounds.
    const U subnormal = bits_as<U>(bits_as<F>(magnitude) + 0.5f) - kHalfBits;
    const U finite = magnitude < kF32MinNormalF16 ? subnormal : normal;
    // An overflowing finite value is infinite; a NaN keeps its quiet bit.
    const U special = magnitude > kF32Inf ? U{} + 0x7e00u : U{} + 0x7c00u;
    return convert_lanes<uint16_t>((magnitude < kF32Overflow ? finite : special) | sign);
  }

 private:
  static constexpr uint32_t kHalfBits = 0x3f000000;                 // 0.5f
  static constexpr uint32_t kF16MinNormal = 1u << 23;               // shifted to f32's place
  static constexpr uint32_t kF16Inf = 31u << 23;                    // shifted to f32's place
  static constexpr uint32_t kF32MinNormalF16 = (127u - 14u) << 23;  // 2^-14
  static constexpr uint32_t kF32Overflow = (127u + 16u) << 23;      // 2^16
  static constexpr uint32_t kF32Inf = 255u << 23;
};

template <DType dtype>
struct DTypeTraits;
#define X(id, name, type, acc)                                   \
  template <>                                                    \
  struct DTypeTraits<DType::id> : public Conversion<DType::id> { \
    using Storage = type;                                        \
    using Acc = acc;                                             \
  };
PYCOLL_FOR_EACH_DTYPE(X)
#undef X

/// Lanes whose + and * wrap: unsigned and at least as wide as int for integers, A itself for
/// floats.
template <class A>
struct WrappingOf {
  using Type = Bits<A>;
};
template <class A>
  requires kFloating<A>
struct WrappingOf<A> {
  using Type = A;
};
template <std::integral A>
struct WrappingOf<A> {
  using Type = std::common_type_t<unsigned, std::make_unsigned_t<A>>;
};
template <class A>
using Wrapping = typename WrappingOf<A>::Type;

/// How an op combines two accumulators, left operand first.
template <Op op>
struct Combine;

template <>
struct Combine<Op::kSum> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    return A(Wrapping<A>(a) + Wrapping<A>(b));
  }
};

template <>
struct Combine<Op::kAvg> : Combine<Op::kSum> {};

template <>
struct Combine<Op::kProd> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    return A(Wrapping<A>(a) * Wrapping<A>(b));
  }
};

template <>
struct Combine<Op::kMin> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    if constexpr (kFloating<A>) {
      // Neither is less: they are equal, zeros of any sign (-0 wins), or one is NaN (and wins).
      const A equal_or_nan = bits_as<A>(bits_as<Bits<A>>(a) | bits_as<Bits<A>>(b));
      const A b_unless_equal = b < a ? b : equal_or_nan;
      return a < b ? a : b_unless_equal;
    } else {
      return a < b ? a : b;
    }
  }
};

template <>
struct Combine<Op::kMax> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    if constexpr (kFloating<A>) {
      return -Combine<Op::kMin>::apply(-a, -b);
    } else {
      return a > b ? a : b;
    }
  }
};

/// Divides by `divisor` (1: does nothing). Integers truncate toward zero; scalars only.
template <class A>
PYCOLL_LANE_FN A divide(A acc, int64_t divisor) {
  if (divisor == 1) return acc;
  if constexpr (kFloating<A>) {
    return acc / static_cast<Lane<A>>(divisor);
  } else if constexpr (sizeof(A) <= 4) {
    // Exact: f64 holds both, and a rounded quotient of theirs never reaches the next integer.
    return static_cast<A>(static_cast<double>(acc) / static_cast<double>(divisor));
  } else {
    return static_cast<A>(static_cast<int64_t>(acc) / divisor);
  }
}

/// Makes every NaN the same: which of two NaNs an addition keeps depends on the instruction.
template <class A>
PYCOLL_LANE_FN A canonical(A acc) {
  if constexpr (kFloating<A>) {
    const A nan = A{} + std::numeric_limits<Lane<A>>::quiet_NaN();
    return acc == acc ? acc : nan;
  } else {
    return acc;
  }
}

/// From the last accumulator to the value that store() writes.
template <class A>
PYCOLL_LANE_FN A finish(A acc, int64_t divisor) {
  return canonical(divide(acc, divisor));
}

}  // namespace pycoll
