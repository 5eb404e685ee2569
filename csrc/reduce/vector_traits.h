// DTypeTraits with the conversion instructions of this instruction set, to the same bits. Included
// by kernels.h inside one file per instruction set.
#pragma once

#include "reduce/element.h"
#include "reduce/vector_memory.h"

namespace pycoll {
namespace {

template <DType dtype>
struct VectorTraits : DTypeTraits<dtype> {};

/// Multiplies complex elements, whose parts lie in adjacent lanes.
struct PairProduct {
  template <class V>
  [[gnu::always_inline]] static V apply(V a, V b) {
    return apply(a, b, std::make_index_sequence<sizeof(V) / sizeof(Lane<V>)>());
  }

 private:
  template <class V, size_t... i>
  [[gnu::always_inline]] static V apply(V a, V b, std::index_sequence<i...>) {
    const V a_re = __builtin_shufflevector(a, a, (i & ~size_t{1})...);
    const V a_im = __builtin_shufflevector(a, a, (i | 1)...);
    const V b_swapped = __builtin_shufflevector(b, b, (i ^ 1)...);
    using Bit = Lane<Bits<V>>;
    constexpr Bit kSign = Bit{1} << (8 * sizeof(Bit) - 1);
    const Bits<V> minus_in_re = {(i % 2 == 0 ? kSign : Bit{0})...};
    return a_re * b + bits_as<V>(bits_as<Bits<V>>(a_im * b_swapped) ^ minus_in_re);
  }
};

// The instructions that small floats need: a vector of f32, and its lanes as 16 and 8 bits.
#if PYCOLL_VECTOR_BYTES == 32

using Floats = Vector<float, 8>;
using Words = Vector<uint16_t, 8>;
using Bytes = Vector<uint8_t, 8>;

inline Floats from_half(Words x) { return _mm256_cvtph_ps((__m128i)x); }
inline Words to_half(Floats x) { return (Words)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
inline Words words_of(Bytes x) {
  return (Words)_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bits_as<int64_t>(x)));
}
/// Narrows lanes, which must be below 256.
inline Bytes bytes_of(Bits<Floats> x) {
  const __m128i low = _mm256_castsi256_si128((__m256i)x);
  const __m128i words = _mm_packus_epi32(low, _mm256_extracti128_si256((__m256i)x, 1));
  return bits_as<Bytes>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
}

#elif PYCOLL_VECTOR_BYTES == 64

using Floats = Vector<float, 16>;
using Words = Vector<uint16_t, 16>;
using Bytes = Vector<uint8_t, 16>;

// Zero-masking forms, because GCC 12 reports the plain ones as uses of uninitialized values.
constexpr uint16_t kAllLanes = 0xffff;

inline Floats from_half(Words x) { return _mm512_maskz_cvtph_ps(kAllLanes, (__m256i)x); }
inline Words to_half(Floats x) {
  return (Words)_mm512_maskz_cvtps_ph(kAllLanes, x, _MM_FROUND_TO_NEAREST_INT);
}
inline Words words_of(Bytes x) { return (Words)_mm256_cvtepu8_epi16((__m128i)x); }
/// Narrows lanes, which must be below 256.
inline Bytes bytes_of(Bits<Floats> x) {
  return (Bytes)_mm512_maskz_cvtepi32_epi8(kAllLanes, (__m512i)x);
}

/// GCC 12 converts 16 lanes in two halves, which measures half as fast as the one instruction.
template <>
struct VectorTraits<DType::kBF16> : DTypeTraits<DType::kBF16> {
  static Floats load(Words x) {
    return (__m512)((Vector<uint32_t, 16>)_mm512_maskz_cvtepu16_epi32(kAllLanes, (__m256i)x) << 16);
  }
  static Words store(Floats x) {
    return (Words)_mm512_maskz_cvtepi32_epi16(kAllLanes, (__m512i)round(x));
  }
};

#endif

#if PYCOLL_VECTOR_BYTES >= 32

template <>
struct VectorTraits<DType::kF16> : DTypeTraits<DType::kF16> {
  static Floats load(Words x) { return from_half(x); }
  static Words store(Floats x) { return to_half(x); }
};

template <>
struct VectorTraits<DType::kF8E5M2> : DTypeTraits<DType::kF8E5M2> {
  static Floats load(Bytes x) { return from_half(words_of(x) << 8); }
  static Bytes store(Floats x) { return bytes_of(round(x)); }
};

template <>
struct VectorTraits<DType::kF8E4M3> : DTypeTraits<DType::kF8E4M3> {
  /// Loads the f16 with this mantissa and exponent, whose bias is 8 larger; 480 is the code of NaN.
  static Floats load(Bytes x) {
    const Words w = words_of(x);
    const Floats value = from_half((w & 0x80) << 8 | (w & 0x7f) << 7) * 256.0f;
    const auto magnitude = bits_as<Bits<Floats>>(value) & 0x7fffffffu;
    const Floats nan = Floats{} + std::numeric_limits<float>::quiet_NaN();
    return magnitude == __builtin_bit_cast(uint32_t, 480.0f) ? nan : value;
  }
  static Bytes store(Floats x) { return bytes_of(round(x)); }
};

#endif

}  // namespace
}  // namespace pycoll
