// DTypeTraits, with the conversions for which this instruction set has instructions, to the same
// bits. Included by kernels.h inside one file per instruction set.
#pragma once

#include "reduce/element.h"
#include "reduce/vector_memory.h"

namespace pycoll {
namespace {

template <DType dtype>
struct VectorTraits : DTypeTraits<dtype> {};

#if PYCOLL_VECTOR_BYTES == 32

template <>
struct VectorTraits<DType::kF16> : DTypeTraits<DType::kF16> {
  static Vector<float, 8> load(Vector<uint16_t, 8> x) { return _mm256_cvtph_ps((__m128i)x); }
  static Vector<uint16_t, 8> store(Vector<float, 8> x) {
    return (Vector<uint16_t, 8>)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  }
};

#elif PYCOLL_VECTOR_BYTES == 64

// The zero-masking forms, because GCC 12 takes the plain ones for uses of uninitialized values.
constexpr uint16_t kAllLanes = 0xffff;

template <>
struct VectorTraits<DType::kF16> : DTypeTraits<DType::kF16> {
  static Vector<float, 16> load(Vector<uint16_t, 16> x) {
    return _mm512_maskz_cvtph_ps(kAllLanes, (__m256i)x);
  }
  static Vector<uint16_t, 16> store(Vector<float, 16> x) {
    return (Vector<uint16_t, 16>)_mm512_maskz_cvtps_ph(kAllLanes, x, _MM_FROUND_TO_NEAREST_INT);
  }
};

/// GCC 12 converts 16 lanes in two halves: half as fast, measured, as by the one instruction.
template <>
struct VectorTraits<DType::kBF16> : DTypeTraits<DType::kBF16> {
  static Vector<float, 16> load(Vector<uint16_t, 16> x) {
    return (__m512)((Vector<uint32_t, 16>)_mm512_maskz_cvtepu16_epi32(kAllLanes, (__m256i)x) << 16);
  }
  static Vector<uint16_t, 16> store(Vector<float, 16> x) {
    return (Vector<uint16_t, 16>)_mm512_maskz_cvtepi32_epi16(kAllLanes, (__m512i)round(x));
  }
};

#endif

}  // namespace
}  // namespace pycoll
