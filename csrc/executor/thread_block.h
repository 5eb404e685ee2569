// ThreadBlock: the Target that acts as one CUDA block made of host threads, with __syncthreads as a
// barrier. It exists so that the control flow of the CUDA kernel runs, under ThreadSanitizer too,
// on machines without a GPU: who waits, who posts, what is read between which barriers.
#pragma once

#include <pthread.h>

#include <cstring>

#include "executor/protocol.h"
#include "reduce/element.h"

namespace pycoll {

/// What the threads of one block share.
class BlockState {
 public:
  BlockState(Links& links, int num_threads) : links_(links), num_threads_(num_threads) {
    pthread_barrier_init(&barrier_, nullptr, static_cast<unsigned>(num_threads));
  }
  ~BlockState() { pthread_barrier_destroy(&barrier_); }
  BlockState(const BlockState&) = delete;
  BlockState& operator=(const BlockState&) = delete;

  Links& links() { return links_; }
  int num_threads() const { return num_threads_; }
  void sync() { pthread_barrier_wait(&barrier_); }
  /// As __syncthreads_and.
  bool agree(bool ready) {
    if (!ready) failed_.store(true, std::memory_order_relaxed);
    sync();
    const bool all = !failed_.load(std::memory_order_relaxed);
    sync();
    return all;
  }

 private:
  Links& links_;
  int num_threads_;
  pthread_barrier_t barrier_;
  std::atomic<bool> failed_{false};  // stays true: a failed program is over
};

/// One thread of a block.
template <DType dtype, Op op>
class ThreadBlock {
 public:
  using Traits = DTypeTraits<dtype>;
  using Storage = typename Traits::Storage;
  using Acc = typename Traits::Acc;
  class LineBatch;

  ThreadBlock(BlockState& block, Segment& segment, Waiter& waiter, int thread_index,
              int64_t divisor)
      : block_(block),
        segment_(segment),
        waiter_(waiter),
        thread_index_(thread_index),
        divisor_(divisor) {}

  Links& links() { return block_.links(); }
  static constexpr size_t element_size() { return sizeof(Storage); }
  uint32_t digest() const { return waiter_.digest(); }
  bool mismatch(int peer) { return waiter_.mismatch(peer); }
  bool is_leader() const { return thread_index_ == 0; }
  int num_threads() const { return block_.num_threads(); }
  int thread_index() const { return thread_index_; }
  void sync() { block_.sync(); }
  bool agree(bool ready) { return block_.agree(ready); }
  template <class Ready>
  bool spin_until(Ready&& ready, const WaitSite& site) {
    return waiter_.spin_until(std::forward<Ready>(ready), site);
  }

  void reduce_copy(const ProgramView& program, const StepOperands& operands);
  void posted(const ProgramView& program, const StepOperands& operands) {
    for_each_peer(program, operands.step->src_peers | operands.step->dst_peers, [this](int peer) {
      segment_.ring_bell(peer);
      return true;
    });
  }

 private:
  BlockState& block_;
  Segment& segment_;
  Waiter& waiter_;
  int thread_index_;
  int64_t divisor_;
};

/// One element on its way from its sources to its destinations. A single source is passed on as
/// its bits, whatever they mean.
template <DType dtype, Op op>
class ElementSum {
 public:
  using Traits = DTypeTraits<dtype>;
  using Storage = typename Traits::Storage;

  void add(Storage source) {
    if (num_srcs_ == 0) {
      bits_ = source;
    } else {
      if (num_srcs_ == 1) acc_ = Traits::load(bits_);
      acc_ = Combine<combining_op(dtype, op)>::apply(acc_, Traits::load(source));
    }
    ++num_srcs_;
  }
  Storage result(int64_t divisor) const {
    if (num_srcs_ == 1 && divisor == 1) return bits_;
    return Traits::store(finish(num_srcs_ == 1 ? Traits::load(bits_) : acc_, divisor));
  }

 private:
  int num_srcs_ = 0;
  Storage bits_{};
  typename Traits::Acc acc_{};
};

/// A line of the block's ll: two 8-byte words, each half data and half flag, because 8 bytes are
/// what a GPU stores and loads as one. The batch of a thread is one line, or as many as hold one
/// element.
template <DType dtype, Op op>
class ThreadBlock<dtype, op>::LineBatch {
 public:
  static constexpr int64_t kLineBytes = 16;
  static constexpr int64_t kLinePayloadBytes = 8;
  static constexpr int kNumLines = sizeof(Storage) > kLinePayloadBytes ? 2 : 1;
  static constexpr int64_t kPayloadBytes = kNumLines * kLinePayloadBytes;
  static constexpr int kNumElements = kPayloadBytes / sizeof(Storage);
  static_assert(kNumElements * sizeof(Storage) == kPayloadBytes);

  LineBatch(ThreadBlock& target, const StepOperands& operands, int64_t at, int64_t num_bytes)
      : target_(target),
        operands_(operands),
        at_(at),
        num_elements_(static_cast<int>(num_bytes / static_cast<int64_t>(sizeof(Storage)))) {}

  bool add_lines(RecvEnd& link, int peer) {
    const auto* words = reinterpret_cast<const uint64_t*>(link.slot() + at_ * 2);
    const uint64_t flag = static_cast<uint32_t>(link.sequence());
    uint64_t payload[kNumLines];
    for (int line = 0; line < kNumLines; ++line) {
      uint64_t loaded[2];
      const bool came = target_.spin_until(
          [&] {
            loaded[0] = load_relaxed(words[2 * line]);
            loaded[1] = load_relaxed(words[2 * line + 1]);
            return loaded[0] >> 32 == flag && loaded[1] >> 32 == flag;
          },
          {peer, operands_.index, operands_.step->first_chunk});
      if (!came) return false;
      payload[line] = (loaded[0] & 0xffffffff) | loaded[1] << 32;
    }
    add(payload);
    return true;
  }
  void add_local() {
    uint64_t payload[kNumLines] = {};
    std::memcpy(payload, operands_.local_src + at_, num_elements_ * sizeof(Storage));
    add(payload);
  }
  void finish() {
    Storage elements[kNumElements] = {};
    for (int i = 0; i < num_elements_; ++i) {
      elements[i] = sums_[i].result(operands_.step->has(kFinal) ? target_.divisor_ : 1);
    }
    std::memcpy(result_, elements, sizeof(result_));
    if (operands_.local_dst != nullptr) {
      std::memcpy(operands_.local_dst + at_, elements, num_elements_ * sizeof(Storage));
    }
  }
  void write_lines(SendEnd& link) const {
    auto* words = reinterpret_cast<uint64_t*>(link.slot() + at_ * 2);
    const uint64_t flag = static_cast<uint64_t>(static_cast<uint32_t>(link.sequence())) << 32;
    for (int line = 0; line < kNumLines; ++line) {
      store_relaxed(words[2 * line], flag | (result_[line] & 0xffffffff));
      store_relaxed(words[2 * line + 1], flag | result_[line] >> 32);
    }
  }

 private:
  void add(const uint64_t* payload) {
    Storage elements[kNumElements];
    std::memcpy(elements, payload, sizeof(elements));
    for (int i = 0; i < num_elements_; ++i) sums_[i].add(elements[i]);
  }

  ThreadBlock& target_;
  const StepOperands& operands_;
  int64_t at_;
  int num_elements_;
  ElementSum<dtype, op> sums_[kNumElements];
  uint64_t result_[kNumLines] = {};
};

template <DType dtype, Op op>
void ThreadBlock<dtype, op>::reduce_copy(const ProgramView& program, const StepOperands& operands) {
  const auto load = [](const std::byte* from, int64_t i) {
    Storage element;
    std::memcpy(&element, from + i * static_cast<int64_t>(sizeof(Storage)), sizeof(Storage));
    return element;
  };
  const auto store = [](std::byte* to, int64_t i, Storage element) {
    std::memcpy(to + i * static_cast<int64_t>(sizeof(Storage)), &element, sizeof(Storage));
  };
  for (int64_t i = thread_index_; i < operands.count; i += num_threads()) {
    ElementSum<dtype, op> sum;
    for_each_source(
        program, links(), operands,
        [&](RecvEnd& link, int) {
          sum.add(load(link.slot(), i));
          return true;
        },
        [&] { sum.add(load(operands.local_src, i)); });
    const Storage result = sum.result(operands.step->has(kFinal) ? divisor_ : 1);
    if (operands.local_dst != nullptr) store(operands.local_dst, i, result);
    for_each_destination(program, links(), *operands.step, [&](SendEnd& link, int) {
      store(link.slot(), i, result);
      return true;
    });
  }
}

}  // namespace pycoll
