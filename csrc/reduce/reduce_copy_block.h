// reduce_copy by threads of a block: dsts <- reduce(srcs) in one pass over memory, with accesses
// of 16 bytes and several of them in flight per thread.
//
// Neighbouring threads take neighbouring packs, so that a warp's accesses are contiguous. Sources
// are loaded in groups before the first of a group is used, and combined in their order.
#pragma once

#include "reduce/pack.h"

namespace pycoll {

/// Operands of the steps of a phase, one step after another, in memory that the block shares: each
/// peer of 64 at most once, and the local chunks of each of 32 steps.
struct BlockOperands {
  const std::byte* srcs[64 + 32];  // of a step: in absolute rank order
  std::byte* dsts[64 + 32];
};

/// Operands of one step, in memory that the block shares.
struct ReduceOperands {
  const std::byte* const* srcs;
  int num_srcs;
  std::byte* const* dsts;
  int num_dsts;
};

/// One thread's part of a reduce_copy.
template <DType dtype>
class BlockReduce {
 public:
  using Traits = DeviceTraits<dtype>;
  using Storage = typename Traits::Storage;
  using Acc = typename Traits::Acc;
  /// The bytes of each source that a thread has in flight.
  static constexpr int32_t kThreadBytes = 4 * 16;

  /// `op` is a combining op (combining_op); `thread_index`: of those that call run() together.
  PYCOLL_HD BlockReduce(const ReduceOperands& operands, Op op, int64_t divisor, int thread_index,
                        int num_threads)
      : srcs_(operands.srcs),
        dsts_(operands.dsts),
        num_srcs_(operands.num_srcs),
        num_dsts_(operands.num_dsts),
        op_(op),
        divisor_(divisor),
        thread_index_(thread_index),
        num_threads_(num_threads) {}

  /// Reduces bytes [begin, end) of the operands; `begin` is a multiple of 16.
  PYCOLL_HD void run(int32_t begin, int32_t end) const {
    if (!all_aligned(sizeof(Storage))) return run_bytes(begin, end);
    constexpr int kNum = 16 / sizeof(Storage);
    const int32_t whole = all_aligned(16) ? end & ~15 : begin;
    if (num_srcs_ == 1 && divisor_ == 1) {
      copy<kNum, 4>(begin, whole);
      copy<1, 1>(whole, end);
      return;
    }
    if (!run_chosen<Op::kSum>(begin, whole) && !run_chosen<Op::kMax>(begin, whole) &&
        !run_chosen<Op::kMin>(begin, whole)) {
      constexpr int kFewer = kNum < 8 ? kNum : 8;
      run_packs<kFewer, 1, AnyOp>(begin, whole);
    }
    run_packs<1, 1, AnyOp>(whole, end);
  }

 private:
  /// The ops that have a loop of their own. All dtypes have one for sums and means.
  static constexpr bool has_loop(Op op) {
    return supported(dtype, op) && combining_op(dtype, op) == op &&
           (op == Op::kSum || dtype_kind(dtype) == DTypeKind::kFloat);
  }
  /// Reduces whole packs of 16 bytes if this is the op. Returns whether it is.
  template <Op op>
  PYCOLL_HD bool run_chosen(int32_t begin, int32_t end) const {
    if constexpr (has_loop(op)) {
      if (op_ != op) return false;
      constexpr int kNum = 16 / sizeof(Storage);
      // Four packs of bytes would have more accumulators than there are registers.
      constexpr int kPacks = kNum <= 8 ? 4 : 1;
      run_packs<kNum, kPacks, Chosen<op>>(begin, end);
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
    for (int k = 0; k < num_srcs_; ++k) aligned &= is_aligned(srcs_[k], alignment);
    for (int d = 0; d < num_dsts_; ++d) aligned &= is_aligned(dsts_[d], alignment);
    return aligned;
  }

  // Operands are parts of tiles: offsets have 32 bits, since the registers are needed for data.

  /// Copies bytes [begin, end) of the only source, with kPacks packs of a thread in flight.
  template <int kNum, int kPacks>
  PYCOLL_HD void copy(int32_t begin, int32_t end) const {
    using Elements = Pack<Storage, kNum>;
    constexpr auto kBytes = static_cast<int32_t>(sizeof(Elements));
    const int32_t row = kBytes * num_threads_;
    const std::byte* src = srcs_[0];
    PYCOLL_NO_UNROLL
    for (int32_t at = begin + kBytes * thread_index_; at < end; at += kPacks * row) {
      Elements loaded[kPacks];
      PYCOLL_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        if (at + p * row < end) loaded[p] = load_pack<Elements>(src + at + p * row);
      }
      PYCOLL_NO_UNROLL
      for (int d = 0; d < num_dsts_; ++d) {
        PYCOLL_UNROLL
        for (int p = 0; p < kPacks; ++p) {
          if (at + p * row < end) store_pack(dsts_[d] + at + p * row, loaded[p]);
        }
      }
    }
  }

  /// Reduces bytes [begin, end), which are whole packs.
  template <int kNum, int kPacks, class Combiner>
  PYCOLL_HD void run_packs(int32_t begin, int32_t end) const {
    constexpr auto kBytes = static_cast<int32_t>(kNum * sizeof(Storage));
    const int32_t row = kBytes * num_threads_;  // one pack of every thread
    int32_t at = begin + kBytes * thread_index_;
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
      const std::byte* src = srcs_[k] + at;
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
      for (int d = 0; d < num_dsts_; ++d) store_pack(dsts_[d] + at + p * row, result);
    }
  }

  /// Reduces byte by byte, when some operand starts inside an element.
  PYCOLL_HD void run_bytes(int32_t begin, int32_t end) const {
    constexpr auto kBytes = static_cast<int32_t>(sizeof(Storage));
    using Element = Pack<Storage, 1>;
    for (int32_t at = begin + kBytes * thread_index_; at < end; at += kBytes * num_threads_) {
      PackSum<dtype, 1> sum;
      for (int k = 0; k < num_srcs_; ++k) {
        sum.add(op_, load_bytes<Element>(srcs_[k] + at));
      }
      const Element result = sum.result(divisor_);
      for (int d = 0; d < num_dsts_; ++d) store_bytes(dsts_[d] + at, result);
    }
  }

  const std::byte* const* srcs_;
  std::byte* const* dsts_;
  int num_srcs_;
  int num_dsts_;
  Op op_;
  int64_t divisor_;
  int thread_index_;
  int num_threads_;
};

}  // namespace pycoll
