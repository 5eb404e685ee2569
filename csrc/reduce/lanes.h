// A lane value is a scalar or a GCC vector of scalars. The element functions are written once over
// lane values: with scalars they run in CUDA device code, with vectors they are the SIMD kernels.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/macros.h"

// Always inlined: the linker could choose an out-of-line copy from one instruction set's file for
// all files, and so run it on a CPU without that instruction set.
#define PYCOLL_LANE_FN __attribute__((always_inline)) PYCOLL_HD inline constexpr

namespace pycoll {

template <class T>
concept Scalar = std::is_arithmetic_v<T>;

/// Unsigned integer of `num_bytes` bytes.
template <size_t num_bytes>
using UintOf =
    std::conditional_t<num_bytes == 1, uint8_t,
                       std::conditional_t<num_bytes == 2, uint16_t,
                                          std::conditional_t<num_bytes == 4, uint32_t, uint64_t>>>;

template <Scalar T, size_t num_lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(num_lanes * sizeof(T))));
};
template <Scalar T, size_t num_lanes>
using Vector = typename VectorOf<T, num_lanes>::type;

template <class L>
struct LaneInfo {
  using Type = std::remove_cvref_t<decltype(std::declval<L&>()[0])>;
  template <Scalar To>
  using With = Vector<To, sizeof(L) / sizeof(Type)>;
};
template <Scalar L>
struct LaneInfo<L> {
  using Type = L;
  template <Scalar To>
  using With = To;
};

/// The scalar type of one lane of L.
template <class L>
using Lane = typename LaneInfo<L>::Type;
/// L with the same number of lanes, of another scalar type.
template <Scalar To, class L>
using WithLane = typename LaneInfo<L>::template With<To>;
/// L with unsigned lanes of the same width.
template <class L>
using Bits = WithLane<UintOf<sizeof(Lane<L>)>, L>;

template <class L>
inline constexpr bool kFloating = std::is_floating_point_v<Lane<L>>;

/// Each lane converted to another scalar type, by value.
template <Scalar To, class L>
PYCOLL_LANE_FN WithLane<To, L> convert_lanes(L x) {
#ifndef __CUDACC__
  if constexpr (!Scalar<L>) return __builtin_convertvector(x, WithLane<To, L>);
#endif
  if constexpr (Scalar<L>) return static_cast<To>(x);
}

/// The same bits, as another type.
template <class To, class From>
PYCOLL_LANE_FN To bits_as(From x) {
  return __builtin_bit_cast(To, x);
}

}  // namespace pycoll
