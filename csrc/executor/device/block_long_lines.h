// Batches of ll128: lines of 128 bytes whose last 8 bytes are the flag. On a GPU 8 neighbouring
// lanes of a warp share a line, 16 bytes each.
//
// Assumption: the 8 stores of a line, which the lanes of one warp issue in one instruction, arrive
// together, so a thread that reads the flag in the last of them can read the rest in the same
// instruction. No memory model promises this. It holds where the GPUs write whole lines of 128
// bytes: within one GPU's memory and over NVLink. It does not hold over PCIe, nor on CPU threads,
// where a release and an acquire of the flag replace it. The set-up of links decides where this
// protocol is used.
#pragma once

#include "executor/device/block.h"

namespace pycoll {

template <class Target, DType dtype>
class BlockBatch<LowLatency128, Target, dtype> {
 public:
  using Storage = typename DeviceTraits<dtype>::Storage;
  static constexpr int64_t kLineBytes = 128;
  // 120; for 16-byte elements 112, so that no element straddles the flag.
  static constexpr int64_t kLinePayloadBytes = 120 / sizeof(Storage) * sizeof(Storage);
  static constexpr int64_t kPayloadBytes = kLinePayloadBytes;
  static constexpr int kTeam = Target::kLineTeam;
  static constexpr bool kCredits = true;

  PYCOLL_HD BlockBatch(Target& target, const StepOperands& operands, int64_t at, int64_t num_bytes)
      : target_(target), operands_(operands), at_(at), num_bytes_(num_bytes) {}

  PYCOLL_HD bool add_lines(device::BlockRecvEnd& link, int peer) {
    const std::byte* line = line_of(link.slot());
    const uint64_t expected = flag_of(link.sequence());
    device::Word16 words[kNumChunks];
    uint64_t flag = 0;
    const bool came = target_.template spin_until<kTeam>(
        [&] {
          if constexpr (kTeam == 1) {
            flag = device::load_acquire(*reinterpret_cast<const uint64_t*>(line + kFlagAt));
            return flag >> 24 == expected >> 24;
          } else {
            words[0] = target_.env().load_of_line(line + chunk(0) * 16);
            flag = words[0].high;
            return target_.env().all_of_line(!has_flag(0) || flag >> 24 == expected >> 24);
          }
        },
        {peer, operands_.index, operands_.step->first_chunk});
    if (!came) return false;
    if (!target_.env().all_of_line(!has_flag(kNumChunks - 1) || flag == expected)) {
      return target_.mismatch(peer, operands_.index);
    }
    PYCOLL_UNROLL
    for (int c = 0; c < kNumChunks; ++c) {
      if constexpr (kTeam == 1) words[c] = reinterpret_cast<const device::Word16*>(line)[c];
      sums_[c].add(target_.op(), __builtin_bit_cast(Elements, words[c]));
    }
    return true;
  }
  PYCOLL_HD void add_local() {
    PYCOLL_UNROLL
    for (int c = 0; c < kNumChunks; ++c) {
      Elements elements{};
      for_elements(c, operands_.local_src, [&](int i, const std::byte* from, bool aligned) {
        elements.x[i] = aligned ? load_pack<Element>(from).x[0] : load_bytes<Element>(from).x[0];
      });
      sums_[c].add(target_.op(), elements);
    }
  }
  PYCOLL_HD void finish() {
    PYCOLL_UNROLL
    for (int c = 0; c < kNumChunks; ++c) {
      results_[c] = sums_[c].result(target_.divisor(operands_));
      if (operands_.local_dst == nullptr) continue;
      for_elements(c, operands_.local_dst, [&](int i, std::byte* to, bool aligned) {
        const Element element{{results_[c].x[i]}};
        if (aligned) {
          store_pack(to, element);
        } else {
          store_bytes(to, element);
        }
      });
    }
  }
  PYCOLL_HD void write_lines(const device::BlockSendEnd& link) const {
    std::byte* line = line_of(link.slot());
    const uint64_t flag = flag_of(link.sequence());
    target_.env().all_of_line(true);  // all lanes store with one instruction
    PYCOLL_UNROLL
    for (int c = 0; c < kNumChunks; ++c) {
      auto words = __builtin_bit_cast(device::Word16, results_[c]);
      if constexpr (kTeam == 1) {
        auto& to = reinterpret_cast<device::Word16*>(line)[c];
        to.low = words.low;
        if (has_flag(c)) {
          device::store_release(to.high, flag);
        } else {
          to.high = words.high;
        }
      } else {
        if (has_flag(c)) words.high = flag;
        target_.env().store_of_line(line + chunk(c) * 16, words);
      }
    }
  }

 private:
  static constexpr int kNumChunks = 8 / kTeam;  // of 16 bytes, handled by this thread
  static constexpr int kPerChunk = 16 / sizeof(Storage);
  static constexpr int64_t kFlagAt = kLineBytes - sizeof(uint64_t);
  using Elements = Pack<Storage, kPerChunk>;
  using Element = Pack<Storage, 1>;

  /// Index of this thread's c-th chunk among the line's 8 chunks.
  PYCOLL_HD int chunk(int c) const { return kTeam == 1 ? c : target_.thread_index() % kTeam; }
  PYCOLL_HD bool has_flag(int c) const { return chunk(c) == 7; }
  /// Flag with 40 bits of the message's number and 24 of the digest, like the CPU's.
  PYCOLL_HD uint64_t flag_of(uint64_t sequence) const {
    return sequence << 24 | (target_.digest() & 0xffffffu);
  }
  PYCOLL_HD std::byte* line_of(std::byte* slot) const {
    return slot + at_ / kLinePayloadBytes * kLineBytes;
  }
  /// Calls visit(i, address, is_aligned) for each element of a chunk that belongs to the message.
  /// is_aligned: the address is a multiple of the element's size.
  template <class Byte, class Visit>
  PYCOLL_HD void for_elements(int c, Byte* buffer, Visit&& visit) const {
    const int64_t first = chunk(c) * 16;
    const bool aligned = is_aligned(buffer + at_, sizeof(Storage));
    constexpr auto kSize = static_cast<int64_t>(sizeof(Storage));
    PYCOLL_UNROLL
    for (int i = 0; i < kPerChunk; ++i) {
      const int64_t in_line = first + i * kSize;
      if (in_line < num_bytes_) visit(i, buffer + at_ + in_line, aligned);
    }
  }

  Target& target_;
  const StepOperands& operands_;
  int64_t at_;
  int64_t num_bytes_;
  PackSum<dtype, kPerChunk> sums_[kNumChunks];
  Elements results_[kNumChunks];
};

}  // namespace pycoll
