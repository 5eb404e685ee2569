// CpuTarget: the Target that runs a program on one CPU thread, with SIMD arithmetic.
#pragma once

#include <cstring>
#include <memory>

#include "base/checksum.h"
#include "executor/cpu/buffer_exchange.h"
#include "executor/links.h"
#include "executor/protocol.h"
#include "executor/wait/wait.h"
#include "reduce/reduce_copy.h"
#include "transport/ring/line.h"

namespace pycoll {

/// Totals of what one rank has sent since its communicator was made.
struct Ledger {
  int64_t sent_bytes = 0;     // payload; a multicast slot counts once per reader
  int64_t sent_messages = 0;  // slots posted; a multicast slot counts once per reader
};

/// The arithmetic of one operation.
struct CpuArithmetic {
  ReduceCopyFn reduce_copy = nullptr;
  size_t element_size = 1;
  int64_t divisor = 1;  // of kFinal steps
  bool streaming = false;
};

class CpuTarget {
 public:
  class LineBatch;
  static constexpr bool kRunsPhases = false;  // one thread gains nothing from it

  CpuTarget(Segment& segment, Waiter& waiter, int num_ranks);

  void begin(Links& links, const CpuArithmetic& arithmetic, const SlotUse& slot_use = {}) {
    links_ = &links;
    arithmetic_ = arithmetic;
    slot_use_ = slot_use;
    if (trades_places()) links.begin_trading_call();
  }
  /// Starts an operation of the protocol direct, with the results of the exchange.
  /// `claims`: of the plan, if this rank is the only reader of what it reads of its peers' inputs,
  /// and may claim it; else null.
  void begin(const BufferExchange& exchange, const Payload& payload,
             const CpuArithmetic& arithmetic, PeerLoads::Claims* claims);

  Links& links() { return *links_; }
  const SlotUse& slot_use() const { return slot_use_; }
  bool trades_places() const { return slot_use_.places == Places::kTraded; }
  size_t element_size() const { return arithmetic_.element_size; }
  uint32_t digest() const { return waiter_.digest(); }
  bool mismatch(int peer, int) { return waiter_.mismatch(peer); }
  static constexpr int num_threads() { return 1; }
  static constexpr int thread_index() { return 0; }
  static constexpr void sync() {}
  static constexpr bool agree(bool ready) { return ready; }
  template <class Ready>
  bool spin_until(Ready&& ready, const WaitSite& site) {
    return waiter_.spin_until(std::forward<Ready>(ready), site);
  }

  /// Visits all peers, since the one thread serves all links.
  template <class Visit>
  [[gnu::always_inline]] static bool for_own_peers(const ProgramView& program, const OneStep& phase,
                                                   uint64_t Step::* peers, Visit&& visit) {
    for (uint64_t mask = phase.operands.step->*peers; mask != 0; mask &= mask - 1) {
      if (!visit(program.peers[lowest_bit(mask)], phase.operands)) return false;
    }
    return true;
  }
  template <class Protocol>
  bool run_lines(const ProgramView& program, const OneStep& phase) {
    return run_in_lines<LineBatch>(*this, program, phase);
  }

  static constexpr void prepare(const ProgramView&, const OneStep&) {}
  /// The bulk arithmetic of a `simple` step: combines slots and local chunks into slots and local
  /// chunks.
  void reduce_copy(const ProgramView& program, const OneStep& phase);
  /// Where the message of a `simple` step is in its slot.
  std::byte* place_in(SendEnd& link, const StepOperands& operands) const {
    return trades_places() ? links_->traded.of(link)
                           : link.place(num_bytes(operands) + links_->checksum_bytes);
  }
  const std::byte* place_in(RecvEnd& link, const StepOperands& operands) const {
    return trades_places() ? links_->traded.of(link)
                           : link.place(num_bytes(operands) + links_->checksum_bytes, slot_use_);
  }
  /// Writes the checksum of a slot that a `simple` step has filled.
  void add_checksum(SendEnd& link, const StepOperands& operands) {
    if (links_->checksum_bytes != 0) [[unlikely]]
      seal(place_in(link, operands), num_bytes(operands));
  }
  /// Whether a full slot has the checksum that its writer gave it; otherwise breaks the
  /// communicator.
  bool has_checksum(RecvEnd& link, int peer, const StepOperands& operands) {
    if (links_->checksum_bytes == 0) [[likely]]
      return true;
    return is_intact(place_in(link, operands), num_bytes(operands)) || waiter_.corrupted(peer);
  }
  bool has_hosts() const { return proxy_ != nullptr; }
  /// Waits for the message of a `simple` step. One from another host that the step only copies may
  /// be received where it is copied to.
  bool await_remote(RecvEnd& link, const StepOperands& operands, const WaitSite& site);
  /// Records a completed step and wakes the ranks that it may have unblocked.
  void on_post(const ProgramView& program, const OneStep& phase) {
    const StepOperands& operands = phase.operands;
    const Step& step = *operands.step;
    const int num_readers = std::popcount(step.dst_peers);
    ledger_.sent_messages += num_readers;
    ledger_.sent_bytes +=
        num_readers * operands.count * static_cast<int64_t>(arithmetic_.element_size);
    if (proxy_ != nullptr) [[unlikely]]
      return on_post_to_hosts(program, operands);
    for_each_peer(program, step.src_peers | step.dst_peers, [this](int peer) {
      segment_.ring_bell(peer);
      return true;
    });
  }
  /// Runs a step of the protocol direct: reads the peers' inputs and writes their outputs. Returns
  /// false when a peer's memory no longer exists.
  bool combine_in_place(const ProgramView& program, const StepOperands& operands);
  /// Runs a step that reads a result from the output of the rank that made it. Returns false like
  /// combine_in_place().
  bool read_result(const ProgramView& program, const StepOperands& operands);
  /// Counts bytes that were read by peers or written to them without a message.
  void count_sent(int64_t nbytes, int64_t num_messages) {
    ledger_.sent_bytes += nbytes;
    ledger_.sent_messages += num_messages;
  }
  const Ledger& ledger() const { return ledger_; }

 private:
  Segment& segment_;
  Proxy* proxy_;  // null: all ranks are on this host
  Waiter& waiter_;
  void on_post_to_hosts(const ProgramView& program, const StepOperands& operands);
  /// Where the bytes are that a `simple` step sends to ranks of other hosts, if not in a slot.
  const std::byte* sent_from(const StepOperands& operands) const {
    if (proxy_ == nullptr || links_->protocol != ProtocolKind::kSimple ||
        links_->checksum_bytes != 0) {
      return nullptr;
    }
    if (operands.local_dst != nullptr) return operands.local_dst;
    return operands.step->src_peers == 0 ? operands.local_src : nullptr;
  }
  size_t num_bytes(const StepOperands& operands) const {
    return static_cast<size_t>(operands.count) * arithmetic_.element_size;
  }
  /// The first `num_streaming` destinations may be written past the caches. `stores`: of the
  /// destinations that are not local, or null.
  void combine(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts,
               const StepOperands& operands, int num_streaming, size_t read_ahead = 0,
               PeerStores* const* stores = nullptr);
  /// Combines arrays of several ranks, and returns lines that were only read to the ranks
  /// `owners` (-1: this rank) that want them. Changes `owners`.
  void combine_mapped(const void* const* srcs, int* owners, int num_srcs, void* const* dsts,
                      int num_dsts, const StepOperands& operands);
  /// In some calls, looks whether the first source of those with owners has been written.
  void look_at_lines(const void* const* srcs, const int* owners, int num_srcs, size_t nbytes);
  std::byte* stage(int index);
  uint64_t offset_in(BufferKind buffer, int32_t index, const StepOperands& operands) const;
  bool process_memory_failed(int peer, const StepOperands& operands);

  Links* links_ = nullptr;
  SlotUse slot_use_;
  const BufferExchange* exchange_ = nullptr;
  PeerLoads::Claims* claims_ = nullptr;
  const Payload* payload_ = nullptr;
  CpuArithmetic arithmetic_;
  std::unique_ptr<std::byte[]> stages_;  // bytes read from other processes, one stage per source
  Ledger ledger_;
  std::unique_ptr<std::byte[]> staging_;  // one batch per source and one for the result
};

/// Up to 64 lines of each source, unpacked into staging memory that stays in L1.
class CpuTarget::LineBatch {
 public:
  static constexpr int64_t kLineBytes = sizeof(CpuLine);
  static constexpr int64_t kLinePayloadBytes = sizeof(CpuLine::payload);
  static constexpr int64_t kPayloadBytes = 64 * kLinePayloadBytes;
  static constexpr int kTeam = 1;
  static constexpr bool kCredits = true;

  LineBatch(CpuTarget& target, const StepOperands& operands, int64_t at, int64_t num_bytes)
      : target_(target), operands_(operands), at_(at), num_bytes_(num_bytes) {}

  /// Waits for the lines one after another: they arrive in address order.
  bool add_lines(RecvEnd& link, int peer) {
    const auto* line = reinterpret_cast<const CpuLine*>(link.slot()) + at_ / kLinePayloadBytes;
    const uint64_t sequence = link.sequence() & CpuLine::kSequenceMask;
    const WaitSite site{peer, operands_.index, operands_.step->first_chunk};
    std::byte* to = staging(num_srcs_);
    srcs_[num_srcs_++] = to;
    for (int64_t done = 0; done < num_bytes_; done += kLinePayloadBytes, ++line) {
      const uint64_t* flag = &line->flag;
      if (!target_.spin_until([=] { return load_acquire(*flag) >> 24 == sequence; }, site)) {
        return false;
      }
      if ((load_relaxed(*flag) & 0xffffff) != (target_.digest() & 0xffffff)) {
        return target_.mismatch(peer, operands_.index);
      }
      std::memcpy(to + done, line->payload, kLinePayloadBytes);
    }
    return true;
  }
  void add_local() { srcs_[num_srcs_++] = operands_.local_src + at_; }

  void finish();

  void write_lines(SendEnd& link) const {
    auto* line = reinterpret_cast<CpuLine*>(link.slot()) + at_ / kLinePayloadBytes;
    const uint64_t flag = CpuLine::flag_of(link.sequence(), target_.digest());
    for (int64_t done = 0; done < num_bytes_; done += kLinePayloadBytes, ++line) {
      const int64_t left = num_bytes_ - done;
      if (left >= kLinePayloadBytes) {
        std::memcpy(line->payload, result_ + done, kLinePayloadBytes);
      } else {
        std::memcpy(line->payload, result_ + done, static_cast<size_t>(left));
      }
      store_release(line->flag, flag);
    }
  }

 private:
  std::byte* staging(int index) const {
    return target_.staging_.get() + static_cast<int64_t>(index) * kPayloadBytes;
  }

  CpuTarget& target_;
  const StepOperands& operands_;
  int64_t at_;
  int64_t num_bytes_;
  const void* srcs_[kMaxPeers + 1];
  int num_srcs_ = 0;
  const std::byte* result_ = nullptr;
};

}  // namespace pycoll
