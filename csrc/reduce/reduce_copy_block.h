// reduce_copy by the threads of a block: dsts <- reduce(srcs) in one pass over memory, with
// accesses of 16 bytes and several of them in flight per thread.
//
// Neighbouring threads take neighbouring packs, so that a warp's accesses are contiguous. Sources
// are loaded in groups before the first of a group is used, and combined in their order.
#pragma once

#include "reduce/pack.h"

namespace pycoll {

/// Operands of a step, in memory that the block shares.
struct BlockOperands {
  const std::byte* srcs[65];  // in absolute rank order: 64 peers and the local chunks
  std::byte* dsts[65];
};

/// One thread's part of a reduce_copy.
template <DType dtype>
class BlockReduce {
 public:
  using Traits = DeviceTraits<dtype>;
  using Storage = typename Traits::Storage;
  using Acc = typename Traits::Acc;

  /// `op` is a combining op (combining_op).
  PYCOLL_HD BlockReduce(const BlockOperands& operands, int num_srcs, int num_dsts, Op op,
                        int64_t divisor, int thread_index, int num_threads)
      : operands_(operands),
        num_srcs_(num_srcs),
        num_dsts_(num_dsts),
        op_(op),
        divisor_(divisor),
        thread_index_(thread_index),
        num_threads_(num_threads) {}

  PYCOLL_HD void run(int64_t count) const {
    const auto num_bytes = count * static_cast<int64_t>(sizeof(Storage));
    if (!all_aligned(sizeof(Storage))) return run_bytes(num_bytes);
    constexpr int kNum = 16 / sizeof(Storage);
    const int64_t whole = all_aligned(16) ? num_bytes & ~int64_t{15} : 0;
    if (num_srcs_ == 1 && divisor_ == 1) {
      copy<kNum, 4>(0, whole);
      copy<1, 1>(whole, num_bytes);
      return;
    }
    if (!run_chosen<Op::kSum>(whole) && !run_chosen<Op::kMax>(whole) &&
        !run_chosen<Op::kMin>(whole)) {
      constexpr int kFewer = kNum < 8 ? kNum : 8;
      run_packs<kFewer, 1, AnyOp>(0, whole);
    }
    run_packs<1, 1, AnyOp>(whole, num_bytes);
  }

 private:
  /// The ops that have a loop of their own. All dtypes have one for sums and means.
  static constexpr bool has_loop(Op op) {
    return supported(dtype, op) && combining_op(dtype, op) == op &&
           (op == Op::kSum || dtype_kind(dtype) == DTypeKind::kFloat);
  }
  /// Reduces whole packs of 16 bytes if this is the op. Returns whether it is.
  template <Op op>
  PYCOLL_HD bool run_chosen(int64_t end) const {
    if constexpr (has_loop(op)) {
      if (op_ != op) return false;
      constexpr int kNum = 16 / sizeof(Storage);
      // Four packs of bytes would have more accumulators than there are registers.
      constexpr int kPacks = kNum <= 8 ? 4 : 1;
      run_packs<kNum, kPacks, Chosen<op>>(0, end);
      return true;
    }
    return false;
  }

  template <Op op>
  struct Chosen {  // an op chosen at compile time
    template <int num>
    static PYCOLL_HD void combine(Op, Acc (&acc)[num], const Pack<Storage, num>& source) {
      combine_pack<op, dtype, num>(acc, source);
    }
    static PYCOLL_HD Acc finish(Acc acc, int64_t divisor) {
      return pycoll::finish(acc, op == Op::kSum ? divisor : 1);
    }
  };
  struct AnyOp {
    template <int num>
    static PYCOLL_HD void combine(Op op, Acc (&acc)[num], const Pack<Storage, num>& source) {
      combine_pack<dtype, num>(op, acc, source);
    }
    static PYCOLL_HD Acc finish(Acc acc, int64_t divisor) { return pycoll::finish(acc, divisor); }
  };

  PYCOLL_HD bool all_aligned(size_t alignment) const {
    bool aligned = true;
    for (int k = 0; k < num_srcs_; ++k) aligned &= is_aligned(operands_.srcs[k], alignment);
    for (int d = 0; d < num_dsts_; ++d) aligned &= is_aligned(operands_.dsts[d], alignment);
    return aligned;
  }

  // Operands are parts of tiles: offsets have 32 bits, since the registers are needed for data.

  /// Copies bytes [begin, num_bytes) of the only source, with kPacks packs of a thread in flight.
  template <int kNum, int kPacks>
  PYCOLL_HD void copy(int64_t begin, int64_t num_bytes) const {
    using Elements = Pack<Storage, kNum>;
    constexpr auto kBytes = static_cast<int32_t>(sizeof(Elements));
    const int32_t row = kBytes * num_threads_;
    const auto end = static_cast<int32_t>(num_bytes);
    const std::byte* src = operands_.srcs[0];
    PYCOLL_NO_UNROLL
    for (int32_t at = static_cast<int32_t>(begin) + kBytes * thread_index_; at < end;
         at += kPacks * row) {
      Elements loaded[kPacks];
      PYCOLL_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        if (at + p * row < end) loaded[p] = load_pack<Elements>(src + at + p * row);
      }
      PYCOLL_NO_UNROLL
      for (int d = 0; d < num_dsts_; ++d) {
        PYCOLL_UNROLL
        for (int p = 0; p < kPacks; ++p) {
          if (at + p * row < end) store_pack(operands_.dsts[d] + at + p * row, loaded[p]);
        }
      }
    }
  }

  /// Reduces bytes [begin, num_bytes), which are whole packs.
  template <int kNum, int kPacks, class Combiner>
  PYCOLL_HD void run_packs(int64_t begin, int64_t num_bytes) const {
    constexpr auto kBytes = static_cast<int32_t>(kNum * sizeof(Storage));
    const int32_t row = kBytes * num_threads_;  // one pack of every thread
    const auto end = static_cast<int32_t>(num_bytes);
    int32_t at = static_cast<int32_t>(begin) + kBytes * thread_index_;
    PYCOLL_NO_UNROLL
    for (; at + (kPacks - 1) * row < end; at += kPacks * row) {
      step<kNum, kPacks, Combiner>(at, row);
    }
    if constexpr (kPacks > 1) {
      PYCOLL_NO_UNROLL
      for (; at < end; at += row) step<kNum, 1, Combiner>(at, row);
    }
  }

  /// Reduces kPacks packs, `row` bytes apart, of all sources. Loads all packs of a source, where
  /// the registers suffice those of the first two sources, before it uses one of them.
  template <int kNum, int kPacks, class Combiner>
  PYCOLL_HD void step(int32_t at, int32_t row) const {
    using Elements = Pack<Storage, kNum>;
    const auto load = [&](int k, Elements(&loaded)[kPacks]) {
      const std::byte* src = operands_.srcs[k] + at;
      PYCOLL_UNROLL
      for (int p = 0; p < kPacks; ++p) loaded[p] = load_pack<Elements>(src + p * row);
    };
    // More than 16 accumulators leave no registers for packs of a second source; of sm_100, ptxas
    // spills with 16.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    constexpr bool kAhead = false;
#else
    constexpr bool kAhead = kPacks > 1 && kPacks * kNum <= 16;
#endif
    Elements first[kPacks];
    Elements next[kPacks];
    Acc acc[kPacks][kNum];
    load(0, first);
    if (kAhead && num_srcs_ > 1) load(1, next);
    PYCOLL_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      PYCOLL_UNROLL
      for (int i = 0; i < kNum; ++i) acc[p][i] = Traits::load(first[p].x[i]);
    }
    PYCOLL_NO_UNROLL
    for (int k = 1; k < num_srcs_; ++k) {
      if (!kAhead || k > 1) load(k, next);
      PYCOLL_UNROLL
      for (int p = 0; p < kPacks; ++p) Combiner::combine(op_, acc[p], next[p]);
    }
    // One pack after another: converted all at once they would exceed the registers.
    PYCOLL_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      Elements result;
      PYCOLL_UNROLL
      for (int i = 0; i < kNum; ++i) {
        result.x[i] = Traits::store(Combiner::finish(acc[p][i], divisor_));
      }
      PYCOLL_NO_UNROLL
      for (int d = 0; d < num_dsts_; ++d) store_pack(operands_.dsts[d] + at + p * row, result);
    }
  }

  /// Reduces byte by byte, when some operand starts inside an element.
  PYCOLL_HD void run_bytes(int64_t num_bytes) const {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Storage));
    using Element = Pack<Storage, 1>;
    for (int64_t at = kBytes * thread_index_; at < num_bytes; at += kBytes * num_threads_) {
      PackSum<dtype, 1> sum;
      for (int k = 0; k < num_srcs_; ++k) {
        sum.add(op_, load_bytes<Element>(operands_.srcs[k] + at));
      }
      const Element result = sum.result(divisor_);
      for (int d = 0; d < num_dsts_; ++d) store_bytes(operands_.dsts[d] + at, result);
    }
  }

  const BlockOperands& operands_;
  int num_srcs_;
  int num_dsts_;
  Op op_;
  int64_t divisor_;
  int thread_index_;
  int num_threads_;
};

}  // namespace pycoll
