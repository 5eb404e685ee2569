// reduce_copy by the threads of a block: dsts <- reduce(srcs) in one pass over memory, with
// accesses of 16 bytes and several of them in flight per thread.
//
// Neighbouring threads take neighbouring packs, so that a warp's accesses are contiguous. Sources
// are loaded in groups before the first of a group is used, and combined in their order.
#pragma once

#include "reduce/pack.h"

namespace pycoll {

/// Where the operands of a step lie. In memory that the block shares.
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

  /// `op` is the one that combines (combining_op).
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
      copy<kNum>(0, whole);
    } else if (combining_op(dtype, Op::kSum) == Op::kSum && op_ == Op::kSum) {
      run_packs<kNum, Chosen<Op::kSum>>(0, whole);
    } else {
      const int64_t row = 16 * num_threads_;
      for (int64_t at = 16 * thread_index_; at < whole; at += row) step<kNum, 1, 4, AnyOp>(at, row);
    }
    const auto kBytes = static_cast<int64_t>(sizeof(Storage));
    for (int64_t at = whole + kBytes * thread_index_; at < num_bytes; at += kBytes * num_threads_) {
      step<1, 1, 4, AnyOp>(at, 0);
    }
  }

 private:
  template <Op op>
  struct Chosen {
    template <int num>
    static PYCOLL_HD void combine(Op, Acc (&acc)[num], const Pack<Storage, num>& source) {
      if constexpr (supported(dtype, op) && combining_op(dtype, op) == op) {
        combine_pack<op, dtype, num>(acc, source);
      }
    }
  };
  struct AnyOp {
    template <int num>
    static PYCOLL_HD void combine(Op op, Acc (&acc)[num], const Pack<Storage, num>& source) {
      combine_pack<dtype, num>(op, acc, source);
    }
  };

  PYCOLL_HD bool all_aligned(size_t alignment) const {
    bool aligned = true;
    for (int k = 0; k < num_srcs_; ++k) aligned &= is_aligned(operands_.srcs[k], alignment);
    for (int d = 0; d < num_dsts_; ++d) aligned &= is_aligned(operands_.dsts[d], alignment);
    return aligned;
  }

  /// Bytes [begin, end) of the only source.
  template <int kNum>
  PYCOLL_HD void copy(int64_t begin, int64_t end) const {
    using Elements = Pack<Storage, kNum>;
    constexpr int kPacks = 4;
    const auto row = static_cast<int64_t>(sizeof(Elements)) * num_threads_;
    int64_t at = begin + static_cast<int64_t>(sizeof(Elements)) * thread_index_;
    const std::byte* src = operands_.srcs[0];
    for (; at < end; at += kPacks * row) {
      Elements loaded[kPacks];
      PYCOLL_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        if (at + p * row < end) loaded[p] = load_pack<Elements>(src + at + p * row);
      }
      for (int d = 0; d < num_dsts_; ++d) {
        PYCOLL_UNROLL
        for (int p = 0; p < kPacks; ++p) {
          if (at + p * row < end) store_pack(operands_.dsts[d] + at + p * row, loaded[p]);
        }
      }
    }
  }

  /// Packs of `kNum` elements in bytes [begin, end).
  template <int kNum, class Combiner>
  PYCOLL_HD void run_packs(int64_t begin, int64_t end) const {
    constexpr int64_t kBytes = kNum * sizeof(Storage);
    const int64_t row = kBytes * num_threads_;  // one pack of every thread
    int64_t at = begin + kBytes * thread_index_;
    // Eight loads in flight: of a few packs of few sources, or of fewer packs of more.
    if (num_srcs_ <= 2) {
      for (; at + 3 * row < end; at += 4 * row) step<kNum, 4, 2, Combiner>(at, row);
    } else {
      for (; at + row < end; at += 2 * row) step<kNum, 2, 4, Combiner>(at, row);
    }
    for (; at < end; at += row) step<kNum, 1, 4, Combiner>(at, row);
  }

  /// kPacks packs, `row` bytes apart, of all sources, kGroup of them at a time: all are loaded
  /// before the first is used.
  template <int kNum, int kPacks, int kGroup, class Combiner>
  PYCOLL_HD void step(int64_t at, int64_t row) const {
    using Elements = Pack<Storage, kNum>;
    Acc acc[kPacks][kNum] = {};
    Elements result[kPacks] = {};
    for (int k = 0; k < num_srcs_; k += kGroup) {
      Elements loaded[kGroup][kPacks];
      PYCOLL_UNROLL
      for (int g = 0; g < kGroup; ++g) {
        if (k + g >= num_srcs_) continue;
        const std::byte* src = operands_.srcs[k + g] + at;
        PYCOLL_UNROLL
        for (int p = 0; p < kPacks; ++p) loaded[g][p] = load_pack<Elements>(src + p * row);
      }
      PYCOLL_UNROLL
      for (int g = 0; g < kGroup; ++g) {
        if (k + g >= num_srcs_) continue;
        PYCOLL_UNROLL
        for (int p = 0; p < kPacks; ++p) {
          if (g == 0 && k == 0) {
            result[p] = loaded[g][p];  // all there is to it, for a copy
            PYCOLL_UNROLL
            for (int i = 0; i < kNum; ++i) acc[p][i] = Traits::load(loaded[g][p].x[i]);
          } else {
            Combiner::combine(op_, acc[p], loaded[g][p]);
          }
        }
      }
    }
    if (num_srcs_ > 1 || divisor_ != 1) {
      PYCOLL_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        PYCOLL_UNROLL
        for (int i = 0; i < kNum; ++i) {
          result[p].x[i] = Traits::store(finish(acc[p][i], divisor_));
        }
      }
    }
    for (int d = 0; d < num_dsts_; ++d) {
      PYCOLL_UNROLL
      for (int p = 0; p < kPacks; ++p) store_pack(operands_.dsts[d] + at + p * row, result[p]);
    }
  }

  /// Some operand starts inside an element.
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
