// Batches of 16-byte lines, each batch processed by a single thread: ll, whose lines are half flag,
// and poison, whose payload is its own flag.
#pragma once

#include "executor/device/block.h"

namespace pycoll {

/// Moves the elements of a thread's batch between the caller's memory and lines.
template <class Target, DType dtype, int kNum>
class BatchElements {
 public:
  using Storage = typename DeviceTraits<dtype>::Storage;
  using Elements = Pack<Storage, kNum>;
  static constexpr int64_t kBytes = sizeof(Elements);

  PYCOLL_HD BatchElements(Target& target, const StepOperands& operands, int64_t at,
                          int64_t num_bytes)
      : target_(target), operands_(operands), at_(at), num_bytes_(num_bytes) {}

  PYCOLL_HD void finish() {
    result_ = sum_.result(target_.divisor(operands_));
    if (operands_.local_dst == nullptr) return;
    std::byte* to = operands_.local_dst + at_;
    if (num_bytes_ == kBytes && is_aligned(to, kBytes)) return store_pack(to, result_);
    const bool aligned = is_aligned(to, sizeof(Storage));
    PYCOLL_UNROLL
    for (int i = 0; i < kNum; ++i) {
      const auto at = i * static_cast<int64_t>(sizeof(Storage));
      if (at >= num_bytes_) break;
      const Pack<Storage, 1> element{{result_.x[i]}};
      if (aligned) {
        store_pack(to + at, element);
      } else {
        store_bytes(to + at, element);
      }
    }
  }

 protected:
  /// Adds all sources in rank order. Loads the batch's lines of several peers before it looks at
  /// one, and again those that are late: the latencies of all peers are one.
  /// Batch: load(link), has_arrived(lines, link), and add(lines, link), which is false for lines of
  /// another call.
  template <class Batch>
  PYCOLL_HD bool add_at_once(Batch& batch, const ProgramView& program) {
    constexpr int kAtOnce = 4 * 16 / static_cast<int>(sizeof(typename Batch::Lines));
    typename Batch::Lines lines[kAtOnce];
    auto& links = target_.links().recv;
    bool local_left = operands_.local_src != nullptr;
    const Elements local = local_left ? load_local() : Elements{};
    for (uint64_t left = operands_.step->src_peers; left != 0;) {
      // Bit i: the lines of the group's i-th peer are late.
      const int num = count_bits(left);
      uint32_t late = (1u << (num < kAtOnce ? num : kAtOnce)) - 1;
      WaitSite site{0, operands_.index, operands_.step->first_chunk};
      const auto for_group = [&](auto&& visit) {
        uint64_t peers = left;
        PYCOLL_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (peers != 0) visit(i, program.peers[lowest_bit(peers)]);
          peers &= peers - 1;
        }
        return peers;
      };
      const auto look = [&] {
        for_group([&](int i, int peer) {
          if (late >> i & 1) lines[i] = batch.load(links[peer]);
        });
        for_group([&](int i, int peer) {
          if ((late >> i & 1) == 0) return;
          if (batch.has_arrived(lines[i], links[peer])) {
            late &= ~(1u << i);
          } else {
            site.peer = peer;
          }
        });
        return late == 0;
      };
      if (!target_.spin_until(look, site)) return false;
      bool same_call = true;
      left = for_group([&](int i, int peer) {
        if (local_left && peer > target_.launch().rank) {
          sum_.add(target_.op(), local);
          local_left = false;
        }
        if (batch.add(lines[i], links[peer])) return;
        same_call = false;
        site.peer = peer;
      });
      if (!same_call) return target_.mismatch(site.peer, operands_.index);
    }
    if (local_left) sum_.add(target_.op(), local);
    return true;
  }

  PYCOLL_HD Elements load_local() const {
    const std::byte* from = operands_.local_src + at_;
    if (num_bytes_ == kBytes && is_aligned(from, kBytes)) return load_pack<Elements>(from);
    Elements elements{};
    const bool aligned = is_aligned(from, sizeof(Storage));
    PYCOLL_UNROLL
    for (int i = 0; i < kNum; ++i) {
      const auto at = i * static_cast<int64_t>(sizeof(Storage));
      if (at >= num_bytes_) break;
      elements.x[i] = aligned ? load_pack<Pack<Storage, 1>>(from + at).x[0]
                              : load_bytes<Pack<Storage, 1>>(from + at).x[0];
    }
    return elements;
  }

  Target& target_;
  const StepOperands& operands_;
  int64_t at_;
  int64_t num_bytes_;
  PackSum<dtype, kNum> sum_;
  Elements result_;
};

/// Number of elements in a thread's batch whose lines carry `line_payload_bytes` bytes each.
template <DType dtype>
PYCOLL_HD constexpr int batch_elements(int line_payload_bytes) {
  const int num = line_payload_bytes / static_cast<int>(dtype_size(dtype));
  return num == 0 ? 1 : num;
}

// --- ll ------------------------------------------------------------------------------------------

/// The flag half of ll's words: 16 bits of the message's number on its ring, 15 of the call's
/// digest, and a highest bit that tells a flag from cleared memory. The numbers repeat after 65,536
/// messages, so before each kClearUses-th return of a slot the reader clears it: no flag in a slot
/// is older than kClearUses uses of it, and kClearUses * kMaxSlots messages are fewer than 65,536.
struct LowLatencyFlag {
  static constexpr uint64_t kClearUses = 4096;
  static_assert(kClearUses * kMaxSlots < (1 << 16));

  static PYCOLL_HD uint32_t of(uint64_t sequence, uint32_t digest) {
    return 0x80000000u | (digest & 0x7fffu) << 16 | static_cast<uint32_t>(sequence & 0xffffu);
  }
  /// True for the flag of the expected message, whichever call it belongs to.
  static PYCOLL_HD bool is_next(uint32_t flag, uint32_t expected) {
    return ((flag ^ expected) & 0x8000ffffu) == 0;
  }
};

/// A line is two 8-byte words, each half payload and half flag, because a GPU is certain to store
/// and load 8 bytes atomically over any link. A batch is one line, or as many lines as one element
/// needs.
template <class Target, DType dtype>
class BlockBatch<LowLatency, Target, dtype>
    : public BatchElements<Target, dtype, batch_elements<dtype>(8)> {
  using Base = BatchElements<Target, dtype, batch_elements<dtype>(8)>;

 public:
  static constexpr int64_t kLineBytes = 16;
  static constexpr int64_t kLinePayloadBytes = 8;
  static constexpr int64_t kPayloadBytes = Base::kBytes;
  static constexpr int kNumLines = static_cast<int>(kPayloadBytes / kLinePayloadBytes);
  static constexpr int kTeam = 1;
  static constexpr bool kCredits = true;

  using Base::Base;

  struct Lines {
    device::Word16 at[kNumLines];
  };

  PYCOLL_HD bool add_sources(const ProgramView& program) {
    return this->add_at_once(*this, program);
  }
  PYCOLL_HD Lines load(const device::BlockRecvEnd& link) const {
    const std::byte* from = link.slot() + this->at_ * 2;
    Lines lines;
    PYCOLL_UNROLL
    for (int i = 0; i < kNumLines; ++i) {
      lines.at[i] = device::load_relaxed16(from + i * kLineBytes);
    }
    return lines;
  }
  PYCOLL_HD bool has_arrived(const Lines& lines, const device::BlockRecvEnd& link) const {
    const uint32_t expected = flag_of(link);
    bool all = true;
    PYCOLL_UNROLL
    for (int i = 0; i < kNumLines; ++i) {
      all = all &&
            LowLatencyFlag::is_next(static_cast<uint32_t>(lines.at[i].low >> 32), expected) &&
            LowLatencyFlag::is_next(static_cast<uint32_t>(lines.at[i].high >> 32), expected);
    }
    return all;
  }
  PYCOLL_HD bool add(const Lines& lines, const device::BlockRecvEnd& link) {
    const uint32_t expected = flag_of(link);
    Payload payload;
    bool same_call = true;
    PYCOLL_UNROLL
    for (int i = 0; i < kNumLines; ++i) {
      const device::Word16& words = lines.at[i];
      same_call = same_call && words.low >> 32 == expected && words.high >> 32 == expected;
      payload.at[i] = (words.low & 0xffffffffu) | words.high << 32;
    }
    this->sum_.add(this->target_.op(), __builtin_bit_cast(typename Base::Elements, payload));
    return same_call;
  }
  PYCOLL_HD void write_lines(const device::BlockSendEnd& link) const {
    std::byte* lines = link.slot() + this->at_ * 2;
    const uint64_t flag = uint64_t{flag_of(link)} << 32;
    const auto payload = __builtin_bit_cast(Payload, this->result_);
    PYCOLL_UNROLL
    for (int line = 0; line < kNumLines; ++line) {
      device::store_relaxed16(lines + line * kLineBytes, {flag | (payload.at[line] & 0xffffffffu),
                                                          flag | payload.at[line] >> 32});
    }
  }
  /// Clears slots whose flags are getting old.
  static PYCOLL_HD void clear(Target& target, const ProgramView& program, const Step& step) {
    for_each_peer(program, step.src_peers, [&](int peer) {
      const device::BlockRecvEnd& link = target.links().recv[peer];
      if ((link.slot_uses() + 1) % LowLatencyFlag::kClearUses != 0) return true;
      target.sync();  // every thread has read its lines
      for (int64_t at = kLineBytes * target.thread_index(); at < link.slot_bytes();
           at += kLineBytes * target.num_threads()) {
        device::store_relaxed16(link.slot() + at, {0, 0});
      }
      return true;
    });
  }

 private:
  struct Payload {
    uint64_t at[kNumLines];
  };
  /// The flag of a link's next message.
  template <class End>
  PYCOLL_HD uint32_t flag_of(const End& link) const {
    return LowLatencyFlag::of(link.sequence(), this->target_.digest());
  }
};

// --- poison --------------------------------------------------------------------------------------

/// A line is 16 bytes of payload. Until it is written, every element of it (every part, for complex
/// dtypes) has all bits set; a reader waits until none has, and sets them all again. A line may
/// arrive in pieces, an element may not.
/// A caller's element that has all bits set is a NaN, and another NaN is sent in its place. The
/// result is the canonical NaN in both cases, since each result combines several sources.
template <class Target, DType dtype>
class BlockBatch<Poison, Target, dtype>
    : public BatchElements<Target, dtype, batch_elements<dtype>(16)> {
  using Base = BatchElements<Target, dtype, batch_elements<dtype>(16)>;
  using Storage = typename Base::Storage;

 public:
  static constexpr int64_t kLineBytes = 16;
  static constexpr int64_t kLinePayloadBytes = 16;
  static constexpr int64_t kPayloadBytes = 16;
  static constexpr int kTeam = 1;
  static constexpr bool kCredits = false;
  static_assert(sizeof(typename Base::Elements) == kLineBytes);

  using Base::Base;

  using Lines = device::Word16;

  PYCOLL_HD bool add_sources(const ProgramView& program) {
    return this->add_at_once(*this, program);
  }
  PYCOLL_HD Lines load(const device::BlockRecvEnd& link) const {
    return device::load_relaxed16(link.slot() + this->at_);
  }
  PYCOLL_HD bool has_arrived(const Lines& line, const device::BlockRecvEnd&) const {
    const auto parts = __builtin_bit_cast(Parts, line);
    bool all = true;
    PYCOLL_UNROLL
    for (int i = 0; i < kNumParts; ++i) all = all && parts.at[i] != kPoisoned;
    return all;
  }
  PYCOLL_HD bool add(const Lines& arrived, const device::BlockRecvEnd& link) {
    std::byte* line = link.slot() + this->at_;
    device::store_relaxed16(line, {~uint64_t{0}, ~uint64_t{0}});
    this->sum_.add(this->target_.op(), __builtin_bit_cast(typename Base::Elements, arrived));
    return true;
  }
  /// Writes the whole line, past the last element too, so that the reader needs no special case.
  PYCOLL_HD void write_lines(const device::BlockSendEnd& link) const {
    auto parts = __builtin_bit_cast(Parts, this->result_);
    PYCOLL_UNROLL
    for (int i = 0; i < kNumParts; ++i) {
      // With one bit cleared it is still a NaN: another bit of the fraction is set. Only f8_e4m3
      // has a single NaN, and is never sent by this protocol (poison_allowed).
      if (parts.at[i] == kPoisoned) parts.at[i] = static_cast<Part>(kPoisoned ^ 1);
    }
    device::store_relaxed16(link.slot() + this->at_, __builtin_bit_cast(device::Word16, parts));
  }

 private:
  // The unit of a store: an element, or one of the two numbers of a complex one.
  static constexpr int kPartBytes = dtype_kind(dtype) == DTypeKind::kComplex
                                        ? static_cast<int>(sizeof(Storage)) / 2
                                        : static_cast<int>(sizeof(Storage));
  using Part = UintOf<kPartBytes>;
  static constexpr int kNumParts = 16 / kPartBytes;
  static constexpr Part kPoisoned = static_cast<Part>(~Part{0});
  struct Parts {
    Part at[kNumParts];
  };
};

}  // namespace pycoll
