// DTypeTraits with a GPU's conversion instructions, where it has them. A check on a GPU compares
// the bits with the CPU's for every pattern (kernels/cuda/check_conversions.cu).
#pragma once

#include "reduce/element.h"

namespace pycoll {

template <DType dtype>
struct DeviceTraits : DTypeTraits<dtype> {};

#ifdef __CUDA_ARCH__
namespace native {
__device__ inline float from_half(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ inline uint16_t to_half(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#if __CUDA_ARCH__ >= 890
#define PYCOLL_NATIVE_F8 1
__device__ inline float from_e4m3(uint8_t bits) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t{bits}));
  return from_half(static_cast<uint16_t>(halves));
}
__device__ inline uint32_t to_e4m3(float x) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(x));
  return bits;
}
__device__ inline float from_e5m2(uint8_t bits) {
  return from_half(static_cast<uint16_t>(bits << 8));
}
__device__ inline uint32_t to_e5m2(float x) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(x));
  return bits;
}
#endif
}  // namespace native
#endif

// The instructions produce another NaN than the canonical one, and the 8-bit ones produce the
// largest finite value where pycoll overflows (decision 0010).

template <>
struct DeviceTraits<DType::kF16> : DTypeTraits<DType::kF16> {
#ifdef __CUDA_ARCH__
  __device__ static float load(uint16_t bits) { return native::from_half(bits); }
  __device__ static uint16_t store(float x) {
    return x == x ? native::to_half(x) : uint16_t{0x7e00};
  }
#endif
};

template <>
struct DeviceTraits<DType::kF8E4M3> : DTypeTraits<DType::kF8E4M3> {
#ifdef PYCOLL_NATIVE_F8
  __device__ static float load(uint8_t bits) { return native::from_e4m3(bits); }
  __device__ static uint8_t store(float x) {
    const uint32_t magnitude = bits_as<uint32_t>(x) & 0x7fffffffu;
    const uint32_t sign = bits_as<uint32_t>(x) >> 24 & 0x80u;
    return static_cast<uint8_t>(magnitude < kF32Overflow ? native::to_e4m3(x) : 0x7fu | sign);
  }
#endif
};

template <>
struct DeviceTraits<DType::kF8E5M2> : DTypeTraits<DType::kF8E5M2> {
#ifdef PYCOLL_NATIVE_F8
  __device__ static float load(uint8_t bits) { return native::from_e5m2(bits); }
  __device__ static uint8_t store(float x) {
    // Halfway between the largest value and the next power of two: rounds to infinity.
    constexpr uint32_t kToInfinity = __builtin_bit_cast(uint32_t, 61440.0f);
    const uint32_t magnitude = bits_as<uint32_t>(x) & 0x7fffffffu;
    const uint32_t sign = bits_as<uint32_t>(x) >> 24 & 0x80u;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7eu : 0x7cu;
    return static_cast<uint8_t>(magnitude < kToInfinity ? native::to_e5m2(x) : special | sign);
  }
#endif
};

}  // namespace pycoll
