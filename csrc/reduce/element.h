// The arithmetic of one element: load -> combine with the other sources -> finish -> store.
// Every target (SIMD on a CPU, devices) uses these functions, so all give the same bits.
//
//   Acc a = DTypeTraits<d>::load(s0[i]);
//   a = Combine<combining_op(d, op)>::apply(a, DTypeTraits<d>::load(s1[i]));
//   dst[i] = DTypeTraits<d>::store(finish(a, divisor));
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "reduce/cells.h"
#include "reduce/conversion.h"

namespace pycoll {

/// Lanes whose + and * wrap: for integers, unsigned and at least as wide as int; for floats, A
/// itself.
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

/// Combines two accumulators, left operand first. avg and premul have no specialization:
/// combining_op() (cells.h) gives the op to use for a dtype and op.
template <Op op>
struct Combine;

template <>
struct Combine<Op::kSum> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    return A(Wrapping<A>(a) + Wrapping<A>(b));
  }
  template <class T>
  static PYCOLL_LANE_FN Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re + b.re, a.im + b.im};
  }
};

template <>
struct Combine<Op::kProd> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    return A(Wrapping<A>(a) * Wrapping<A>(b));
  }
  /// Four products, each rounded. Infinite parts are not treated specially.
  template <class T>
  static PYCOLL_LANE_FN Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
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

template <>
struct Combine<Op::kBand> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    return A(a & b);
  }
};

template <>
struct Combine<Op::kBor> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    return A(a | b);
  }
};

template <>
struct Combine<Op::kBxor> {
  template <class A>
  static PYCOLL_LANE_FN A apply(A a, A b) {
    return A(a ^ b);
  }
};

/// Divides by `divisor` (no change for 1). Integers truncate toward zero; scalars only.
template <class A>
PYCOLL_LANE_FN A divide(A acc, int64_t divisor) {
  if (divisor == 1) return acc;
  if constexpr (kFloating<A>) {
    return acc / static_cast<Lane<A>>(divisor);
  } else if constexpr (sizeof(A) <= 4) {
    // Exact: f64 holds both, and their rounded quotient never reaches the next integer.
    return static_cast<A>(static_cast<double>(acc) / static_cast<double>(divisor));
  } else if constexpr (std::is_unsigned_v<A>) {
    return static_cast<A>(acc / static_cast<uint64_t>(divisor));
  } else {
    return static_cast<A>(acc / divisor);
  }
}

/// Replaces every NaN by the canonical one: which of two NaNs an addition keeps depends on the
/// instruction.
template <class A>
PYCOLL_LANE_FN A canonical(A acc) {
  if constexpr (kFloating<A>) {
    const A nan = A{} + std::numeric_limits<Lane<A>>::quiet_NaN();
    return acc == acc ? acc : nan;
  } else {
    return acc;
  }
}

/// Converts the last accumulator to the value that store() writes.
template <class A>
PYCOLL_LANE_FN A finish(A acc, int64_t divisor) {
  return canonical(divide(acc, divisor));
}
template <class T>
PYCOLL_LANE_FN Complex<T> finish(Complex<T> acc, int64_t divisor) {
  return {finish(acc.re, divisor), finish(acc.im, divisor)};
}

}  // namespace pycoll
