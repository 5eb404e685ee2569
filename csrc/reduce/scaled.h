// The scaling step of premul for one element, identical to the CPU kernels (Scale, kernels.h).
#pragma once

#include "reduce/element.h"

namespace pycoll {

/// x * factor in the accumulator's type, with a canonical NaN. Integers wrap; complex numbers are
/// multiplied by a real factor.
template <class A>
PYCOLL_LANE_FN A scaled(A x, double factor) {
  if constexpr (kFloating<A>) {
    return canonical(Combine<Op::kProd>::apply(x, static_cast<A>(factor)));
  } else {
    // Modulo 2^bits, so that negative factors are right, too.
    const auto whole = factor < 0 ? static_cast<uint64_t>(static_cast<int64_t>(factor))
                                  : static_cast<uint64_t>(factor);
    return Combine<Op::kProd>::apply(x, static_cast<A>(whole));
  }
}
template <class T>
PYCOLL_LANE_FN Complex<T> scaled(Complex<T> x, double factor) {
  return {scaled(x.re, factor), scaled(x.im, factor)};
}

}  // namespace pycoll
