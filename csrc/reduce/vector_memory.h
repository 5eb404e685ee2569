// Unaligned, partial and non-temporal access to vectors of kVectorBytes and parts of it.
// Included by kernels.h inside one file per instruction set, after its `#pragma GCC target`.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef PYCOLL_X86
#include <immintrin.h>
#endif

namespace pycoll {
namespace {

constexpr size_t kVectorBytes = PYCOLL_VECTOR_BYTES;

/// A whole vector.
struct Whole {
  static constexpr bool kPastCaches = false;
  template <class V>
  [[gnu::always_inline]] V load(const char* src) const {
    V v;
    __builtin_memcpy(&v, src, sizeof(V));
    return v;
  }
  template <class V>
  [[gnu::always_inline]] void store(char* dst, V v) const {
    __builtin_memcpy(dst, &v, sizeof(V));
  }
};

// Partial: the first nbytes of a vector; the rest is neither read (zeros instead) nor written.
#if PYCOLL_VECTOR_BYTES == 64

/// Stores the bytes of a vector that `mask` names.
template <class V>
[[gnu::always_inline]] inline void store_bytes(char* dst, uint64_t mask, V v) {
  if constexpr (sizeof(V) == 64) {
    _mm512_mask_storeu_epi8(dst, mask, (__m512i)v);
  } else if constexpr (sizeof(V) == 32) {
    _mm256_mask_storeu_epi8(dst, static_cast<__mmask32>(mask), (__m256i)v);
  } else {
    _mm_mask_storeu_epi8(dst, static_cast<__mmask16>(mask), (__m128i)v);
  }
}

class Partial {
 public:
  static constexpr bool kPastCaches = false;
  explicit Partial(size_t nbytes) : mask_((uint64_t{1} << nbytes) - 1) {}

  template <class V>
  [[gnu::always_inline]] V load(const char* src) const {
    if constexpr (sizeof(V) == 64) {
      return (V)_mm512_maskz_loadu_epi8(mask_, src);
    } else if constexpr (sizeof(V) == 32) {
      return (V)_mm256_maskz_loadu_epi8(mask_, src);
    } else {
      return (V)_mm_maskz_loadu_epi8(mask_, src);
    }
  }
  template <class V>
  [[gnu::always_inline]] void store(char* dst, V v) const {
    store_bytes(dst, mask_, v);
  }

 private:
  uint64_t mask_;
};

#else

/// nbytes < size, a power of two: the binary digits of nbytes select the pieces, without a call.
template <size_t size>
[[gnu::always_inline]] inline void copy_below(char* dst, const char* src, size_t nbytes) {
  if constexpr (size > 1) {
    constexpr size_t half = size / 2;
    if (nbytes & half) __builtin_memcpy(dst, src, half);
    copy_below<half>(dst + (nbytes & half), src + (nbytes & half), nbytes);
  }
}

class Partial {
 public:
  static constexpr bool kPastCaches = false;
  explicit Partial(size_t nbytes) : nbytes_(nbytes) {}

  template <class V>
  [[gnu::always_inline]] V load(const char* src) const {
    V v{};
    copy_below<sizeof(V)>(reinterpret_cast<char*>(&v), src, nbytes_);
    return v;
  }
  template <class V>
  [[gnu::always_inline]] void store(char* dst, V v) const {
    copy_below<sizeof(V)>(dst, reinterpret_cast<const char*>(&v), nbytes_);
  }

 private:
  size_t nbytes_;
};

#endif

/// A whole vector of which only the last nbytes are written. Nothing past its end is accessed; a
/// Partial load of the last line of a slot takes the line behind it from the writer, though it
/// reads no byte of it.
class LastBytes {
 public:
  static constexpr bool kPastCaches = false;
  explicit LastBytes(size_t nbytes) : nbytes_(nbytes) {}

  template <class V>
  [[gnu::always_inline]] V load(const char* src) const {
    return Whole{}.load<V>(src);
  }
  template <class V>
  [[gnu::always_inline]] void store(char* dst, V v) const {
    const size_t before = sizeof(V) - nbytes_;
#if PYCOLL_VECTOR_BYTES == 64
    store_bytes(dst, ~uint64_t{0} << before, v);
#else
    copy_below<sizeof(V)>(dst + before, reinterpret_cast<const char*>(&v) + before, nbytes_);
#endif
  }

 private:
  size_t nbytes_;
};

/// Stores past the caches; dst is aligned to the vector.
template <class V>
[[gnu::always_inline]] inline void store_streaming(char* dst, V v) {
#ifdef PYCOLL_X86
  if constexpr (sizeof(V) == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), (__m512i)v);
  } else if constexpr (sizeof(V) == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), (__m256i)v);
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst), (__m128i)v);
  }
#else
  Whole{}.store(dst, v);
#endif
}

/// Whole aligned vectors, written past the caches.
struct PastCaches {
  static constexpr bool kPastCaches = true;
  static constexpr size_t kMinBytes = 16;  // of a vector
  template <class V>
  [[gnu::always_inline]] void store(char* dst, V v) const {
    store_streaming(dst, v);
  }
};

/// Orders non-temporal stores before every later store, so that a flag may be set after it.
inline void streaming_fence() {
#ifdef PYCOLL_X86
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace pycoll
