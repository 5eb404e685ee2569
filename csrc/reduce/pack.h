// Packs: up to 16 bytes of neighbouring elements that one device thread reduces together. They use
// the scalar functions of element.h, so the bits equal the CPU's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/device_traits.h"

namespace pycoll {

template <class Storage, int num>
struct Pack {
  Storage x[num];
};

/// Whether `at` is a multiple of `alignment`, a power of two.
PYCOLL_HD inline bool is_aligned(const void* at, size_t alignment) {
  return (reinterpret_cast<uintptr_t>(at) & (alignment - 1)) == 0;
}

/// Loads a pack from bytes of unknown alignment, one by one: slow, and rare.
template <class P>
PYCOLL_HD inline P load_bytes(const std::byte* from) {
  struct Bytes {
    std::byte at[sizeof(P)];
  } bytes;
  for (size_t i = 0; i < sizeof(P); ++i) bytes.at[i] = from[i];
  return __builtin_bit_cast(P, bytes);
}

template <class P>
PYCOLL_HD inline void store_bytes(std::byte* to, const P& pack) {
  struct Bytes {
    std::byte at[sizeof(P)];
  };
  const auto bytes = __builtin_bit_cast(Bytes, pack);
  for (size_t i = 0; i < sizeof(P); ++i) to[i] = bytes.at[i];
}

#ifdef __CUDA_ARCH__
// Accesses of a whole pack, in global memory: the addresses come from shared memory, so the
// compiler would take generic ones. Each byte is used once: it is not kept in the L1 cache.
namespace global {
template <size_t num_bytes>
struct Access;
#define PYCOLL_GLOBAL_ACCESS(num_bytes, type, suffix, constraint)        \
  template <>                                                            \
  struct Access<num_bytes> {                                             \
    using Word = type;                                                   \
    static __device__ Word load(const std::byte* from) {                 \
      Word word;                                                         \
      asm volatile("ld.global.L1::no_allocate." suffix " %0, [%1];"      \
                   : "=" constraint(word)                                \
                   : "l"(__cvta_generic_to_global(from))                 \
                   : "memory");                                          \
      return word;                                                       \
    }                                                                    \
    static __device__ void store(std::byte* to, Word word) {             \
      asm volatile("st.global." suffix " [%0], %1;"                      \
                   :                                                     \
                   : "l"(__cvta_generic_to_global(to)), constraint(word) \
                   : "memory");                                          \
    }                                                                    \
  };
PYCOLL_GLOBAL_ACCESS(2, uint16_t, "u16", "h")
PYCOLL_GLOBAL_ACCESS(4, uint32_t, "u32", "r")
PYCOLL_GLOBAL_ACCESS(8, uint64_t, "u64", "l")
#undef PYCOLL_GLOBAL_ACCESS
template <>
struct Access<1> {
  using Word = uint8_t;
  static __device__ Word load(const std::byte* from) { return static_cast<Word>(*from); }
  static __device__ void store(std::byte* to, Word word) { *to = static_cast<std::byte>(word); }
};
template <>
struct Access<16> {
  using Word = ulonglong2;
  static __device__ Word load(const std::byte* from) {
    Word word;
    asm volatile("ld.global.L1::no_allocate.v2.u64 {%0, %1}, [%2];"
                 : "=l"(word.x), "=l"(word.y)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return word;
  }
  static __device__ void store(std::byte* to, Word word) {
    asm volatile("st.global.v2.u64 [%0], {%1, %2};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "l"(word.x), "l"(word.y)
                 : "memory");
  }
};
}  // namespace global
#endif

/// Loads or stores sizeof(P) bytes at a multiple of that size in one access.
template <class P>
PYCOLL_HD inline P load_pack(const std::byte* from) {
#ifdef __CUDA_ARCH__
  return __builtin_bit_cast(P, global::Access<sizeof(P)>::load(from));
#else
  P pack;
  __builtin_memcpy(&pack, from, sizeof(P));
  return pack;
#endif
}
template <class P>
PYCOLL_HD inline void store_pack(std::byte* to, const P& pack) {
#ifdef __CUDA_ARCH__
  using Access = global::Access<sizeof(P)>;
  Access::store(to, __builtin_bit_cast(typename Access::Word, pack));
#else
  __builtin_memcpy(to, &pack, sizeof(P));
#endif
}

/// acc <- acc . source, element by element. `op` is a combining op (combining_op).
template <Op op, DType dtype, int num>
PYCOLL_HD inline void combine_pack(typename DeviceTraits<dtype>::Acc (&acc)[num],
                                   const Pack<typename DeviceTraits<dtype>::Storage, num>& source) {
  PYCOLL_UNROLL
  for (int i = 0; i < num; ++i) {
    acc[i] = Combine<op>::apply(acc[i], DeviceTraits<dtype>::load(source.x[i]));
  }
}
/// Like the above, with the op chosen at run time. All threads take the same branch per pack, which
/// costs less than the pack's loads and needs one kernel per dtype instead of one per cell.
template <DType dtype, int num>
PYCOLL_HD inline void combine_pack(Op op, typename DeviceTraits<dtype>::Acc (&acc)[num],
                                   const Pack<typename DeviceTraits<dtype>::Storage, num>& source) {
  switch (op) {
#define X(id, name)                                                                    \
  case Op::id:                                                                         \
    if constexpr (supported(dtype, Op::id) && combining_op(dtype, Op::id) == Op::id) { \
      combine_pack<Op::id, dtype, num>(acc, source);                                   \
    }                                                                                  \
    break;
    PYCOLL_FOR_EACH_OP(X)
#undef X
  }
}

/// Accumulates a pack from its sources. The bits of a single source are passed on unchanged,
/// whatever they mean.
template <DType dtype, int num>
class PackSum {
 public:
  using Traits = DeviceTraits<dtype>;
  using Storage = typename Traits::Storage;
  using Elements = Pack<Storage, num>;

  PYCOLL_HD void add(Op op, const Elements& source) {
    if (num_srcs_ == 0) {
      bits_ = source;
    } else {
      if (num_srcs_ == 1) open();
      combine_pack<dtype, num>(op, acc_, source);
    }
    ++num_srcs_;
  }
  PYCOLL_HD Elements result(int64_t divisor) {
    if (num_srcs_ == 1) {
      if (divisor == 1) return bits_;
      open();
    }
    Elements result;
    PYCOLL_UNROLL
    for (int i = 0; i < num; ++i) result.x[i] = Traits::store(finish(acc_[i], divisor));
    return result;
  }

 private:
  PYCOLL_HD void open() {
    PYCOLL_UNROLL
    for (int i = 0; i < num; ++i) acc_[i] = Traits::load(bits_.x[i]);
  }

  int num_srcs_ = 0;
  Elements bits_{};
  typename Traits::Acc acc_[num]{};
};

}  // namespace pycoll
