// The world of a frame check: rank 0 with real links, and a test that plays all other ranks.
//
//   rank 0  this process: segment, proxy, message engine, pending sends and receives
//   rank 1  of another host, a member
//   rank 2  of another host, a member
//   rank 3  of this host, a member; it does nothing
//   rank 4  of another host, no member of the communicator
//
// A frame may change what the sender's links hold, and the arrays of receives that its messages
// match. All other memory of the segment is write-protected or compared, and so is the
// neighbourhood of every array.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "frame_networks.h"
#include "p2p/message_engine.h"
#include "transport/memory/mapping.h"
#include "transport/proxy/proxy.h"
#include "transport/transport.h"

namespace pycoll {

inline constexpr int kNumRanks = 5;    // of the world
inline constexpr int kNumMembers = 4;  // ranks 0 to 3
inline constexpr uint64_t kGroup = 0xf4a3e5;
inline constexpr std::array<int, 3> kRemote = {1, 2, 4};

/// Rank 0 of the communicator, without a bootstrap.
class RankZero final : public Transport {
 public:
  explicit RankZero(Segment& segment) : segment_(segment) {}
  std::string_view name() const override { return "tcp"; }
  std::string group_name() const override { return "frames"; }
  int rank() const override { return 0; }
  int num_ranks() const override { return kNumMembers; }
  Segment& segment() override { return segment_; }
  std::shared_ptr<SharedHeap> heap() override { return nullptr; }
  bool shares_address_space() const override { return false; }
  pid_t pid(int) const override { return 0; }
  std::optional<int> ended_by(int, Look) override { return std::nullopt; }
  std::unique_ptr<Transport> make_subgroup(std::span<const int>, const std::string&,
                                           const Deadline&) override {
    return nullptr;
  }
  void release() override {}

 private:
  Segment& segment_;
};

/// A user's array between bytes that must not change, between pages that cannot be accessed.
class GuardedArray {
 public:
  explicit GuardedArray(size_t nbytes)
      : nbytes_(nbytes),
        page_(static_cast<size_t>(::getpagesize())),
        open_((nbytes / page_ + 3) * page_),
        mapping_(-1, open_ + 2 * page_, PROT_NONE) {
    begin_ = mapping_.base() + page_;
    ::mprotect(begin_, open_, PROT_READ | PROT_WRITE);
    data_ = begin_ + (open_ - nbytes) / 2 / 8 * 8;
    pattern_.assign(open_, std::byte{0x5a});
    clear();
  }
  std::byte* data() { return data_; }
  size_t nbytes() const { return nbytes_; }
  void clear() { std::memset(begin_, 0x5a, open_); }
  /// Whether all bytes around the array, and with `whole` the array too, are as they were.
  bool is_intact(bool whole) const {
    const auto before = static_cast<size_t>(data_ - begin_);
    const size_t after = open_ - before - nbytes_;
    return std::memcmp(begin_, pattern_.data(), before) == 0 &&
           std::memcmp(data_ + nbytes_, pattern_.data(), after) == 0 &&
           (!whole || std::memcmp(data_, pattern_.data(), nbytes_) == 0);
  }

 private:
  size_t nbytes_;
  size_t page_;
  size_t open_;  // bytes that can be accessed
  Mapping mapping_;
  std::byte* begin_;
  std::byte* data_;
  std::vector<std::byte> pattern_;
};

struct Operation {
  bool is_send;
  int peer;
  int32_t tag;
  std::unique_ptr<GuardedArray> array;
  MessageOp op;
};

/// The arrays of all worlds: made once, because pages are expensive.
inline std::vector<Operation>& operations() {
  static std::vector<Operation> all = [] {
    std::vector<Operation> made;
    const auto add = [&made](bool is_send, int peer, int32_t tag, size_t nbytes) {
      made.push_back({is_send, peer, tag, std::make_unique<GuardedArray>(nbytes), {}});
    };
    add(false, 1, 0, 24);
    add(false, 1, 1, 3000);
    add(false, 1, 2, 100'000);
    add(false, kAnySource, 3, 500);
    add(false, 2, 2, 70'000);
    add(true, 1, 9, 150'000);
    add(true, 1, 9, 100);
    add(true, 2, 9, 150'000);
    return made;
  }();
  return all;
}
inline constexpr size_t kLargeReceive = 2;  // from rank 1, tag 2
inline constexpr size_t kReceiveFrom2 = 4;  // from rank 2, tag 2
inline constexpr size_t kLargeSend = 5;     // to rank 1
inline constexpr size_t kLargeSendTo2 = 7;

class FrameWorld {
 public:
  explicit FrameWorld(FrameNetwork& network)
      : network_(network),
        memory_(-1, SegmentLayout::for_ranks(kNumMembers).total_bytes),
        segment_(memory_.base(), kNumMembers),
        host_links_(std::make_shared<HostLinks>(network.make_wire({1, 2, 4}, kNumRanks), kNumRanks,
                                                std::vector<int>{1, 2, 4}, 0, false)),
        transport_(segment_) {
    segment_.introduce("frames");
    make_proxy();
    peer_memory_ = std::make_unique<PeerMemory>(transport_);
    for (int rank = 0; rank < kNumMembers; ++rank) store_release(segment_.control(rank).state, 1);
    segment_.publish(0, record(1));
    segment_.publish(3, record(1));
    engine_ = std::make_unique<MessageEngine>(transport_, *peer_memory_, /*checks_data=*/false);
    for (const int peer : {1, 2}) {
      for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
        const auto protocol = static_cast<ProtocolKind>(kind);
        writers_[peer][kind] = SendEnd(segment_.ring(protocol, 0, peer));
        readers_[peer][kind] = RecvEnd(segment_.ring(protocol, peer, 0), 0);
      }
    }
    protect();
    for (Operation& one : operations()) {
      one.array->clear();
      post(one);
    }
  }
  ~FrameWorld() {
    engine_->fail_all([](const MessageOp&) { return std::exception_ptr(); });
    engine_->take_finished();
    engine_.reset();
    network_.end();
    segment_.set_proxy(nullptr);
    proxy_.reset();
  }

  Segment& segment() { return segment_; }
  FrameNetwork& network() { return network_; }
  Proxy* proxy() { return proxy_.get(); }
  HostLinks::Peer state_of(int peer) const { return host_links_->state_of(peer); }
  bool is_closed(int peer) const { return state_of(peer) != HostLinks::Peer::kThere; }
  bool is_broken() const { return load_acquire(segment_.failure_word()) != 0; }

  /// The communicator that all tests use; without it, its frames are those of an unknown one.
  void make_proxy() {
    proxy_ = std::make_unique<Proxy>(host_links_, segment_, 0, std::vector<int>{0, 1, 2, 3},
                                     RankSet("0110"), kGroup);
    segment_.set_proxy(proxy_.get());
  }
  void drop_proxy() {
    segment_.set_proxy(nullptr);
    proxy_.reset();
  }

  /// Delivers bytes of `peer` and lets rank 0 work.
  void deliver(int peer, const std::string& bytes) {
    size_t sent = 0;
    for (int i = 0; i < 64 && !network_.send(peer, bytes, &sent); ++i) host_links_->poll(-1);
    step();
  }
  /// Sends bytes of `peer` that fit into its link at once, and receives frames once.
  void deliver_once(int peer, const std::string& bytes) {
    size_t sent = 0;
    network_.send(peer, bytes, &sent);
    host_links_->poll(-1);
  }
  void step() {
    for (int i = 0; i < 4; ++i) host_links_->poll(-1);
    engine_->progress(kAnySource);
    engine_->take_finished();
  }
  /// Receives frames, without a look into the mailboxes.
  void only_poll() {
    for (int i = 0; i < 4; ++i) host_links_->poll(-1);
  }
  /// Sends a frame to `peer` that its link copies; returns its size.
  size_t send_copy(int peer, size_t nbytes) {
    copied_.resize(nbytes);
    send_slot(peer, copied_, Rest::copied());
    return nbytes;
  }
  void send_slot(int peer, const std::vector<std::byte>& payload, Rest rest) {
    const std::lock_guard lock(host_links_->mutex());
    FrameHeader header;
    header.kind = FrameKind::kSlot;
    header.nbytes = static_cast<uint32_t>(payload.size());
    host_links_->send(peer, header, payload.data(), rest);
  }
  /// Posts another send, of bytes that belong to this object.
  void post_extra_send(int peer, size_t nbytes) {
    MessageOp& op = *extra_.emplace_back(std::make_unique<MessageOp>());
    extra_bytes_.resize(std::max(extra_bytes_.size(), nbytes));
    op.is_send = true;
    op.dtype = DType::kU8;
    op.peer = peer;
    op.tag = 10;
    op.data = extra_bytes_.data();
    op.nbytes = nbytes;
    engine_->post(&op);
  }
  void buffer_announced() { engine_->buffer_announced(kAnySource); }
  /// Posts again what is over.
  void repost() {
    for (Operation& one : operations()) {
      if (one.op.is_over() && !is_broken()) post(one);
    }
  }
  /// Reads all slots that have come from `peer`, and writes one to it.
  void use_slots(int peer) {
    for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
      const auto protocol = static_cast<ProtocolKind>(kind);
      RecvEnd& reader = readers_[peer][kind];
      while (protocol == ProtocolKind::kSimple && reader.has_full_slot()) {
        reader.release();
        proxy_->released(protocol, peer);
      }
      SendEnd& writer = writers_[peer][kind];
      if (!writer.has_free_slot({})) continue;
      if (protocol == ProtocolKind::kSimple) {
        writer.post(1);
      } else {
        writer.post_in_band();
      }
      proxy_->on_post(protocol, peer, 100, 1, 1);
    }
  }

  /// Empty, or what has changed that no frame may change.
  std::string damage() {
    for (size_t i = 0; i < operations().size(); ++i) {
      const Operation& one = operations()[i];
      if (one.array->is_intact(one.is_send)) continue;
      return "bytes outside receive " + std::to_string(i) + " (or of a send) have changed";
    }
    if (shared_bytes() != before_) return "flags, states or records of other ranks have changed";
    return "";
  }

  static CallRecord record(uint64_t sequence) {
    CallRecord record;
    record.sequence = sequence;
    record.num_dims = 1;
    record.shape[0] = record.count = 10;
    record.element_size = 4;
    record.digest = record.compute_digest();
    return record;
  }

 private:
  void post(Operation& one) {
    one.op = MessageOp{};
    one.op.is_send = one.is_send;
    one.op.dtype = DType::kU8;
    one.op.peer = one.peer;
    one.op.tag = one.tag;
    one.op.data = one.array->data();
    one.op.nbytes = one.array->nbytes();
    engine_->post(&one.op);
    engine_->take_finished();
  }

  /// Makes most of the segment read-only: all but the pages that links to ranks 1 and 2 use.
  void protect() {
    const SegmentLayout& layout = segment_.layout();
    const auto set = [this](size_t begin, size_t end, int protection) {
      ::mprotect(memory_.base() + begin, end - begin, protection);
    };
    constexpr int kBoth = PROT_READ | PROT_WRITE;
    set(layout.records, layout.flags, PROT_READ);
    set(layout.slots, layout.message_records, PROT_READ);
    set(layout.mailboxes, layout.total_bytes, PROT_READ);
    for (const int peer : {1, 2}) {
      const auto at = static_cast<size_t>(peer);
      const size_t records = layout.records + at * RecordRing::kBytes;
      set(records, records + RecordRing::kBytes, kBoth);
      const size_t names = layout.names + at * NameTable::kBytes;
      set(names, names + NameTable::kBytes, kBoth);
      for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
        for (const auto& [from, to] : {std::pair{0, peer}, std::pair{peer, 0}}) {
          const RingMemory ring = segment_.ring(static_cast<ProtocolKind>(kind), from, to);
          const size_t slots = static_cast<size_t>(ring.slots - memory_.base());
          set(slots, slots + static_cast<size_t>(ring.num_slots) * ring.stride_bytes, kBoth);
        }
      }
      for (const auto& [from, to] : {std::pair{0, peer}, std::pair{peer, 0}}) {
        const MailboxMemory mail = segment_.mailbox(from, to);
        const auto* begin = reinterpret_cast<const std::byte*>(mail.reader);
        const auto* end = reinterpret_cast<const std::byte*>(mail.lines + mail.num_lines);
        set(static_cast<size_t>(begin - memory_.base()), static_cast<size_t>(end - memory_.base()),
            kBoth);
      }
    }
    before_ = shared_bytes();
  }

  /// The bytes that share pages with what frames may change, and that no frame may change.
  std::string shared_bytes() const {
    std::string bytes;
    const auto add = [&bytes](const void* from, size_t size) {
      bytes.append(static_cast<const char*>(from), size);
    };
    for (int from = 0; from < kNumMembers; ++from) {
      for (int to = 0; to < kNumMembers; ++to) {
        const bool is_link = (from == 0) != (to == 0) && from != 3 && to != 3;
        if (is_link) continue;
        for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
          const RingMemory ring = segment_.ring(static_cast<ProtocolKind>(kind), from, to);
          add(ring.tail, (1 + kNumMembers) * sizeof(FlagLine));
        }
      }
    }
    add(&segment_.control(3), sizeof(RankControl));
    add(&segment_.message_mismatch(3), sizeof(MessageMismatch));
    add(segment_.peer_memory_addresses(), kNumMembers * sizeof(PeerMemoryAddress));
    const SegmentHeader& header = segment_.header();
    add(&header, offsetof(SegmentHeader, failure));
    return bytes;
  }

  FrameNetwork& network_;
  Mapping memory_;
  Segment segment_;
  std::shared_ptr<HostLinks> host_links_;
  RankZero transport_;
  std::unique_ptr<Proxy> proxy_;
  std::unique_ptr<PeerMemory> peer_memory_;
  std::unique_ptr<MessageEngine> engine_;
  SendEnd writers_[kNumMembers][kNumSlotProtocols];
  RecvEnd readers_[kNumMembers][kNumSlotProtocols];
  std::string before_;
  std::vector<std::byte> copied_;
  std::vector<std::unique_ptr<MessageOp>> extra_;
  std::vector<std::byte> extra_bytes_ = std::vector<std::byte>(60'000);
};

}  // namespace pycoll
