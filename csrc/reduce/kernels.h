// The reduce_copy kernels, compiled once per instruction set: a file defines PYCOLL_VECTOR_BYTES,
// selects its target and includes this. All functions have internal linkage, so that the linker
// never mixes the code of different instruction sets.
#pragma once

#include "base/prefetch.h"
#include "reduce/copy_to_peer.h"
#include "reduce/kernel_table.h"
#include "reduce/vector_memory.h"
#include "reduce/vector_traits.h"

namespace pycoll {
namespace {

/// Several destinations, or a streaming one, are written block by block: the result of a block is
/// computed once, in L1, and copied from there.
constexpr size_t kBlockBytes = 8192;

/// A result and its copy in a slot, by a string move: the longer the move, the faster (decision
/// 0018).
constexpr size_t kStringBlockBytes = 128 << 10;

/// Prefetch distance in bytes of what is written, and copied. For short operands the hints would
/// mostly fetch lines past the end.
constexpr size_t kPrefetchDistance = kReadAhead;
inline size_t prefetch_distance(size_t nbytes) {
  return nbytes < kBlockBytes ? 0 : kPrefetchDistance;
}

using ByteVector = Vector<uint8_t, kVectorBytes>;

/// Number of bytes until dst is aligned to a vector.
inline size_t misalignment(const char* dst, size_t alignment) {
  return -reinterpret_cast<uintptr_t>(dst) % alignment;
}

/// Runs with the first and last vector unaligned, overlapping the aligned middle; also exact for
/// dst == src.
template <bool streaming>
[[gnu::noinline]] void copy(char* dst, const char* src, size_t nbytes) {
  if (nbytes < kVectorBytes) {
    const Partial part(nbytes);
    return part.store(dst, part.load<ByteVector>(src));
  }
  const Whole whole;
  const ByteVector first = whole.load<ByteVector>(src);
  const ByteVector last = whole.load<ByteVector>(src + nbytes - kVectorBytes);
  const size_t ahead = prefetch_distance(nbytes);
  size_t i = misalignment(dst, kVectorBytes);
  if (i != 0) whole.store(dst, first);
#pragma GCC unroll 4
  for (; i + kVectorBytes <= nbytes; i += kVectorBytes) {
    if (ahead != 0) prefetch_for_read(src + i + ahead);
    if constexpr (!streaming) prefetch_for_write(dst + i + ahead);
    const ByteVector v = whole.load<ByteVector>(src + i);
    if constexpr (streaming) {
      store_streaming(dst + i, v);
    } else {
      whole.store(dst + i, v);
    }
  }
  if (i != nbytes) whole.store(dst + nbytes - kVectorBytes, last);
}

/// Writes a block that another core reads next. True if it went past the caches, and no fence has
/// followed.
[[gnu::always_inline]] inline bool write_to_peer(char* dst, const char* src, size_t nbytes,
                                                 PeerStores* stores) {
  const PeerStores::Turn turn = stores == nullptr ? PeerStores::Turn{} : stores->next(dst, nbytes);
  if (turn.past_caches) {
    copy<true>(dst, src, nbytes);
    if (turn.timed) streaming_fence();
  } else if (nbytes >= kMinStringMoveBytes && pays_to_move_strings(dst, src)) {
    string_move(dst, src, nbytes);
  } else {
    copy<false>(dst, src, nbytes);
  }
  if (turn.timed) stores->took(turn, nbytes);
  return turn.past_caches;
}

/// A range of lanes: `end` is not part of it.
struct Lanes {
  size_t begin = 0;
  size_t end = 0;
};

/// One kernel, for elements of `lanes_per_element` lanes of `dtype`, combined by Combiner.
template <DType dtype, class Combiner, size_t lanes_per_element = 1>
struct Reduce {
  using Traits = VectorTraits<dtype>;
  using Storage = typename Traits::Storage;
  using Acc = typename Traits::Acc;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(Acc);
  using StorageLanes = Vector<Storage, kNumLanes>;
  using AccLanes = Vector<Acc, kNumLanes>;

  /// Reduces num_vectors adjacent vectors of every source in registers, in one pass for any fan-in,
  /// and passes the result to `write`.
  /// `ahead`: what is prefetched, bytes from here; 0: nothing.
  template <int num_vectors, class Access, class Write>
  [[gnu::always_inline]] static void step(const ReduceCopyArgs& args, size_t begin, Access access,
                                          size_t ahead, Write write) {
    const size_t offset = begin * sizeof(Storage);
    AccLanes acc[num_vectors];
    load(static_cast<const char*>(args.srcs[0]) + offset, access, ahead, acc);
    for (int k = 1; k < args.num_srcs; ++k) {
      AccLanes next[num_vectors];
      load(static_cast<const char*>(args.srcs[k]) + offset, access, ahead, next);
#pragma GCC unroll 8
      for (int v = 0; v < num_vectors; ++v) acc[v] = Combiner::apply(acc[v], next[v]);
    }
    if constexpr (kFloating<Acc>) {
#pragma GCC unroll 8
      for (int v = 0; v < num_vectors; ++v) acc[v] = finish(acc[v], args.divisor);
    }
    write(acc);
  }
  template <int num_vectors, class Access>
  [[gnu::always_inline]] static void step_to(char* out, const ReduceCopyArgs& args, size_t begin,
                                             Access access, size_t read_ahead = 0,
                                             size_t write_ahead = 0) {
    step<num_vectors>(args, begin, access, read_ahead,
                      [&](const auto& acc) { store(out, access, write_ahead, acc); });
  }

  /// Loads adjacent vectors; with ConvertsPairs, each two of them have even and odd elements.
  template <int num_vectors, class Access>
  [[gnu::always_inline]] static void load(const char* src, Access access, size_t ahead,
                                          AccLanes (&to)[num_vectors]) {
    if (num_vectors > 1 && ahead != 0) {
#pragma GCC unroll 8
      for (size_t at = 0; at < num_vectors * sizeof(StorageLanes); at += 64) {
        prefetch_for_read(src + at + ahead);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < num_vectors; ++v) {
      const char* const from = src + v * sizeof(StorageLanes);
      if constexpr (num_vectors % 2 == 0 && ConvertsPairs<Traits, AccLanes>) {
        if (v % 2 == 0)
          Traits::load_pair(access.template load<Bits<AccLanes>>(from), to[v], to[v + 1]);
      } else {
        to[v] = Traits::load(access.template load<StorageLanes>(from));
      }
    }
  }
  template <int num_vectors, class Access>
  [[gnu::always_inline]] static void store(char* out, Access access, size_t ahead,
                                           const AccLanes (&from)[num_vectors]) {
#pragma GCC unroll 8
    for (int v = 0; v < num_vectors; ++v) {
      char* const to = out + v * sizeof(StorageLanes);
      if (num_vectors > 1 && !Access::kPastCaches && v * sizeof(StorageLanes) % 64 == 0) {
        prefetch_for_write(to + ahead);
      }
      if constexpr (num_vectors % 2 == 0 && ConvertsPairs<Traits, AccLanes>) {
        if (v % 2 == 0) access.store(to, Traits::store_pair(from[v], from[v + 1]));
      } else {
        access.store(to, Traits::store(from[v]));
      }
    }
  }

  /// Writes lanes [begin, begin + count) of the result to `out`.
  static void reduce(const ReduceCopyArgs& args, size_t begin, size_t count, char* out) {
    size_t i = 0;
    const auto part = [&](size_t num) {
      step_to<1>(out + i * sizeof(Storage), args, begin + i, Partial(num * sizeof(Storage)));
      i += num;
    };
    if (count >= 4 * kNumLanes) {
      const size_t head = misalignment(out, sizeof(StorageLanes)) /
                          (lanes_per_element * sizeof(Storage)) * lanes_per_element;
      if (head != 0) part(head);
      const size_t ahead = prefetch_distance(count * sizeof(Storage));
      for (; i + 4 * kNumLanes <= count; i += 4 * kNumLanes) {
        step_to<4>(out + i * sizeof(Storage), args, begin + i, Whole{}, args.read_ahead, ahead);
      }
    }
    for (; i + kNumLanes <= count; i += kNumLanes) {
      step_to<1>(out + i * sizeof(Storage), args, begin + i, Whole{});
    }
    if (i < count && count < kNumLanes) {
      part(count);
    } else if (i < count) {
      const size_t last = count - kNumLanes;
      step_to<1>(out + last * sizeof(Storage), args, begin + last,
                 LastBytes((count - i) * sizeof(Storage)));
    }
    if constexpr (!kFloating<Acc>) {
      if (args.divisor != 1) divide_all(out, count, args.divisor);
    }
  }

  /// Writes lines of the result past the caches to all destinations, from the registers, as far as
  /// all of them begin a line at the same element. Returns the range of lanes that it has written.
  static Lanes reduce_past_caches(const ReduceCopyArgs& args) {
    if (!kFloating<Acc> && args.divisor != 1) return {};
    char* const first = static_cast<char*>(args.dsts[0]);
    const size_t head = misalignment(first, 64);
    if (head % (lanes_per_element * sizeof(Storage)) != 0) return {};
    for (int d = 1; d < args.num_dsts; ++d) {
      if (misalignment(static_cast<char*>(args.dsts[d]), 64) != head) return {};
    }
    const size_t before = head / sizeof(Storage);
    const size_t begin = before < args.count ? before : args.count;
    size_t i = begin;
    for (; i + 4 * kNumLanes <= args.count; i += 4 * kNumLanes) {
      step<4>(args, i, Whole{}, 0, [&](const auto& acc) {
        for (int d = 0; d < args.num_dsts; ++d) {
          store(static_cast<char*>(args.dsts[d]) + i * sizeof(Storage), PastCaches{}, 0, acc);
        }
      });
    }
    return {begin, i};
  }

  /// Divides stored integers, which are their own accumulators.
  static void divide_all(char* out, size_t count, int64_t divisor) {
    for (size_t i = 0; i < count; ++i) {
      Storage x;
      __builtin_memcpy(&x, out + i * sizeof(Storage), sizeof(Storage));
      x = finish(x, divisor);
      __builtin_memcpy(out + i * sizeof(Storage), &x, sizeof(Storage));
    }
  }

  /// Writes lanes [begin, end) of the result block by block. True if some went past the caches.
  static bool run_blocks(const ReduceCopyArgs& args, size_t begin, size_t end) {
    const bool streaming = args.num_streaming != 0;
    const bool string_moves = !streaming && args.peer_stores != nullptr && args.num_dsts == 2 &&
                              args.first_to_peer == 1 &&
                              pays_to_move_strings(args.dsts[1], args.dsts[0]);
    const size_t whole_block = (string_moves ? kStringBlockBytes : kBlockBytes) / sizeof(Storage);
    bool past_caches = streaming;
    alignas(64) char buffer[kBlockBytes];
    // Streamed blocks end at line boundaries: a line that is written partly past the caches and
    // partly through them costs more than ten whole lines.
    const size_t past_line =
        streaming ? (reinterpret_cast<uintptr_t>(args.dsts[0]) + begin * sizeof(Storage)) % 64 : 0;
    size_t block = whole_block - past_line / sizeof(Storage);
    for (; begin < end; begin += block, block = whole_block) {
      const size_t count = end - begin < block ? end - begin : block;
      const size_t offset = begin * sizeof(Storage);
      const size_t nbytes = count * sizeof(Storage);
      char* const first = static_cast<char*>(args.dsts[0]) + offset;
      const char* result;
      if (is_copy(args)) {
        result = static_cast<const char*>(args.srcs[0]) + offset;
      } else {
        const bool to_peer =
            (kStringMoves || args.peer_stores != nullptr) && args.first_to_peer == 0;
        char* const out = streaming || to_peer ? buffer : first;
        reduce(args, begin, count, out);
        result = out;
      }
      for (int d = 0; d < args.num_dsts; ++d) {
        char* const dst = static_cast<char*>(args.dsts[d]) + offset;
        if (dst == result) continue;
        if (d < args.num_streaming) {
          copy<true>(dst, result, nbytes);
        } else if (d >= args.first_to_peer) {
          past_caches |= write_to_peer(dst, result, nbytes, args.stores_of(d));
        } else {
          copy<false>(dst, result, nbytes);
        }
      }
    }
    return past_caches;
  }

  static bool is_copy(const ReduceCopyArgs& args) {
    return args.num_srcs == 1 && args.divisor == 1;
  }

  static void run(const ReduceCopyArgs& caller_args) {
    ReduceCopyArgs args = caller_args;  // a local copy, which no store can change
    args.count *= lanes_per_element;
    Lanes streamed;
    if constexpr (sizeof(StorageLanes) >= PastCaches::kMinBytes) {
      if (args.num_streaming == args.num_dsts && !is_copy(args)) {
        streamed = reduce_past_caches(args);
      }
    }
    bool past_caches = streamed.begin != 0 && run_blocks(args, 0, streamed.begin);
    past_caches |= run_blocks(args, streamed.end, args.count);
    if (past_caches) streaming_fence();
  }
};

void copy_bytes_kernel(void* dst, const void* src, size_t nbytes, bool streaming) {
  if (streaming) {
    copy<true>(static_cast<char*>(dst), static_cast<const char*>(src), nbytes);
    streaming_fence();
  } else {
    copy<false>(static_cast<char*>(dst), static_cast<const char*>(src), nbytes);
  }
}

/// dst[i] <- src[i] * factor.
template <DType dtype>
struct Scale {
  using Traits = VectorTraits<dtype>;
  using Storage = typename Traits::Storage;
  using Acc = typename Traits::Acc;
  static constexpr size_t kNumLanes = kVectorBytes / sizeof(Acc);
  using StorageLanes = Vector<Storage, kNumLanes>;
  using AccLanes = Vector<Acc, kNumLanes>;

  /// The factor modulo 2^bits for integers, so that a negative one is right for unsigned lanes too.
  static Acc factor_of(double factor) {
    if constexpr (kFloating<Acc>) return static_cast<Acc>(factor);
    return static_cast<Acc>(factor < 0 ? static_cast<uint64_t>(static_cast<int64_t>(factor))
                                       : static_cast<uint64_t>(factor));
  }

  static void run(void* dst, const void* src, size_t count, double factor) {
    const AccLanes factors = factor_of(factor) - AccLanes{};  // a subtraction, which keeps -0
    const auto step = [&](size_t begin, auto access) {
      const size_t offset = begin * sizeof(Storage);
      const AccLanes x =
          Traits::load(access.template load<StorageLanes>(static_cast<const char*>(src) + offset));
      const AccLanes product = canonical(Combine<Op::kProd>::apply(x, factors));
      access.store(static_cast<char*>(dst) + offset, Traits::store(product));
    };
    size_t i = 0;
    for (; i + kNumLanes <= count; i += kNumLanes) step(i, Whole{});
    if (i < count) step(i, Partial((count - i) * sizeof(Storage)));
  }
};

// --- Which kernel serves which cell --------------------------------------------------------------
//
// Cells with identical bits share a kernel, since each kernel costs compile time and size.

/// Runs `fn` on elements that consist of several lanes of its own type.
template <ReduceCopyFn fn, size_t lanes_per_element>
void reduce_lanes(const ReduceCopyArgs& args) {
  ReduceCopyArgs of_lanes = args;
  of_lanes.count *= lanes_per_element;
  fn(of_lanes);
}
template <ScaleFn fn, size_t lanes_per_element>
void scale_lanes(void* dst, const void* src, size_t count, double factor) {
  fn(dst, src, count * lanes_per_element, factor);
}

/// The dtype of the two lanes of a complex element.
template <DType dtype>
constexpr DType kPartOf = dtype == DType::kC128 ? DType::kF64 : DType::kF32;

/// Unsigned dtype for multiplication, which gives the same bits for signed integers.
constexpr DType unsigned_of(DType dtype) {
  switch (dtype) {
    case DType::kI8:
      return DType::kU8;
    case DType::kI16:
      return DType::kU16;
    case DType::kI32:
      return DType::kU32;
    case DType::kI64:
      return DType::kU64;
    default:
      return dtype;
  }
}

template <DType dtype, Op op>
constexpr ReduceCopyFn kernel() {
  constexpr Op combining = combining_op(dtype, op);
  using Combiner = Combine<combining>;
  if constexpr (!supported(dtype, op)) {
    return nullptr;
  } else if constexpr (dtype_kind(dtype) == DTypeKind::kComplex) {
    constexpr DType part = kPartOf<dtype>;
    if constexpr (combining == Op::kProd) return Reduce<part, PairProduct, 2>::run;
    return reduce_lanes<Reduce<part, Combiner>::run, 2>;
  } else if constexpr (is_bitwise(combining) && dtype != DType::kBool) {
    return reduce_lanes<Reduce<DType::kU8, Combiner>::run, dtype_size(dtype)>;
  } else if constexpr (combining == Op::kProd) {
    return Reduce<unsigned_of(dtype), Combiner>::run;
  } else {
    return Reduce<dtype, Combiner>::run;
  }
}

template <DType dtype>
constexpr ScaleFn scale_kernel() {
  if constexpr (!supported(dtype, Op::kPremul)) {
    return nullptr;
  } else if constexpr (dtype_kind(dtype) == DTypeKind::kComplex) {
    return scale_lanes<Scale<kPartOf<dtype>>::run, 2>;
  } else {
    return Scale<unsigned_of(dtype)>::run;
  }
}

template <size_t... cell, size_t... dtype>
constexpr KernelTable make_kernel_table(std::index_sequence<cell...>,
                                        std::index_sequence<dtype...>) {
  return {{kernel<static_cast<DType>(cell / kNumOps), static_cast<Op>(cell % kNumOps)>()...},
          {scale_kernel<static_cast<DType>(dtype)>()...},
          copy_bytes_kernel};
}

constexpr KernelTable kKernels =
    make_kernel_table(std::make_index_sequence<size_t{kNumDTypes} * kNumOps>(),
                      std::make_index_sequence<kNumDTypes>());

}  // namespace
}  // namespace pycoll
