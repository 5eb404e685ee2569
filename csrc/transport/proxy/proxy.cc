#include "transport/proxy/proxy.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "transport/proxy/state_snapshot.h"
#include "transport/ring/line.h"

namespace pycoll {
Proxy::Proxy(std::shared_ptr<HostLinks> host_links, Segment& segment, int rank,
             std::vector<int> members, const RankSet& remote, uint64_t group)
    : host_links_(std::move(host_links)),
      segment_(segment),
      rank_(rank),
      members_(std::move(members)),
      remote_(remote),
      group_(group),
      links_(members_.size()) {
  ranks_.assign(static_cast<size_t>(*std::max_element(members_.begin(), members_.end())) + 1, -1);
  for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer) {
    ranks_[static_cast<size_t>(members_[static_cast<size_t>(peer)])] = peer;
    if (!is_remote(peer)) continue;
    for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
      const auto protocol = static_cast<ProtocolKind>(kind);
      link(peer).out[kind] = segment.ring(protocol, rank, peer);
      link(peer).in[kind] = segment.ring(protocol, peer, rank);
    }
    link(peer).mail_out = segment.mailbox(rank, peer);
    link(peer).mail_in = segment.mailbox(peer, rank);
    // Joining fails unless every remote rank joins, so mark it as joined now.
    store_release(segment.control(peer).state, 1);
  }
  packed_.resize(segment.layout().slot_bytes[static_cast<size_t>(ProtocolKind::kLL)]);
  const std::lock_guard lock(host_links_->mutex());
  host_links_->add(*this);
}

Proxy::~Proxy() { close(); }

void Proxy::reject(int peer) {
  const std::lock_guard lock(host_links_->mutex());
  host_links_->reject(members_[static_cast<size_t>(peer)]);
}

void Proxy::revoke(std::string_view reason) {
  segment_.revoke(rank_, reason);
  const std::lock_guard lock(host_links_->mutex());
  tell_failure();
}

void Proxy::fail(const Failure& failure) {
  segment_.fail(failure);
  const std::lock_guard lock(host_links_->mutex());
  tell_failure();
}

void Proxy::close() {
  if (host_links_->is_disowned()) return;
  const std::lock_guard lock(host_links_->mutex());
  if (closed_) return;
  closed_ = true;
  const SegmentLayout& layout = segment_.layout();
  const auto* begin = reinterpret_cast<const std::byte*>(&segment_.header());
  host_links_->remove(*this, begin, begin + layout.total_bytes);
}

// Sending.

void Proxy::send(int peer, FrameHeader header, const void* payload, Rest rest) {
  Link& to = link(peer);
  header.group = group_;
  for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
    to.told[kind] = load_acquire(to.in[kind].heads[0].value);
    header.heads[kind] = static_cast<uint32_t>(to.told[kind]);
  }
  host_links_->send(members_[static_cast<size_t>(peer)], header, payload, rest);
}

void Proxy::send_bytes(int peer, FrameKind kind, const std::string& bytes) {
  FrameHeader header;
  header.kind = kind;
  header.nbytes = static_cast<uint32_t>(bytes.size());
  send(peer, header, bytes.data(), Rest::copied());
}

void Proxy::say_joined() {
  const std::lock_guard lock(host_links_->mutex());
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    if (is_remote(peer)) send_bytes(peer, FrameKind::kJoin, "");
  }
}

std::vector<int> Proxy::missing() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    if (is_remote(peer) && !links_[static_cast<size_t>(peer)].joined) ranks.push_back(peer);
  }
  return ranks;
}

void Proxy::on_post(ProtocolKind protocol, int peer, int64_t nbytes, uint32_t mark, uint64_t call,
                    const std::byte* payload) {
  const std::lock_guard lock(host_links_->mutex());
  Link& to = link(peer);
  const auto kind = static_cast<size_t>(protocol);
  std::byte* const slot = to.out[kind].slot(to.posted[kind]++);
  FrameHeader header;
  header.kind = FrameKind::kSlot;
  header.protocol = static_cast<uint8_t>(kind);
  header.nbytes = static_cast<uint32_t>(nbytes);
  header.mark = mark;
  header.call = static_cast<uint32_t>(call);
  header.sequence = static_cast<uint32_t>(to.posted[kind]);
  if (payload != nullptr) return send(peer, header, payload, Rest::copied_to(slot));
  if (protocol == ProtocolKind::kLL) {
    // The receiver's proxy writes new flags into the lines.
    const auto* line = reinterpret_cast<const CpuLine*>(slot);
    const auto size = static_cast<size_t>(nbytes);
    for (size_t at = 0; at < size; at += CpuLine::kPayloadBytes, ++line) {
      std::memcpy(packed_.data() + at, line->payload, std::min(CpuLine::kPayloadBytes, size - at));
    }
    return send(peer, header, packed_.data(), Rest::copied());
  }
  send(peer, header, slot, Rest::stays());
}

void Proxy::released(ProtocolKind protocol, int peer) {
  const std::lock_guard lock(host_links_->mutex());
  Link& from = link(peer);
  const auto kind = static_cast<size_t>(protocol);
  // Usually the credit returns with the next message; a writer without credits asks for it. The
  // writer of long messages hears of them early, so that the link is full while the credit travels,
  // unless this rank sends messages, too.
  const uint64_t head = load_relaxed(from.in[kind].heads[0].value);
  const auto num_slots = static_cast<uint64_t>(from.in[kind].num_slots);
  const bool was_long =
      protocol == ProtocolKind::kSimple && from.elsewhere[(head - 1) % num_slots] != nullptr;
  const bool answers = from.posted[kind] != from.posted_then[kind];
  if (head - from.told[kind] >= num_slots / (was_long && !answers ? 4 : 2)) {
    from.posted_then[kind] = from.posted[kind];
    send_bytes(peer, FrameKind::kCredit, "");
  }
}

void Proxy::ring(int peer) {
  const std::lock_guard lock(host_links_->mutex());
  if (closed_) return;
  ship_messages(peer);
  tell_mail(peer);
  if (load_acquire(segment_.failure_word()) != 0) tell_failure();
  if (load_acquire(segment_.control(rank_).state) == 2 && !link(peer).left) {
    link(peer).left = true;
    send_bytes(peer, FrameKind::kLeft, "");
  }
}

void Proxy::ship_messages(int peer) {
  Link& to = link(peer);
  for (;;) {
    const MessageHeader* header = &to.mail_out.lines[to.shipped & (to.mail_out.num_lines - 1)];
    if (load_acquire(header->flag) == 0) return;
    const size_t num_lines = header->kind == MessageKind::kSkip ? 1 : header->num_lines;
    FrameHeader frame;
    frame.kind = FrameKind::kLines;
    frame.nbytes = static_cast<uint32_t>(num_lines * sizeof(CpuLine));
    frame.word = to.shipped;
    to.shipped += header->num_lines;
    if (header->kind == MessageKind::kEager) {
      to.shipped_eager_bytes += MailboxWriter::eager_cost(header->nbytes);
    }
    send(peer, frame, header, Rest::stays());
  }
}

void Proxy::tell_mail(int peer) {
  Link& from = link(peer);
  const uint64_t head = load_acquire(from.mail_in.reader->head);
  const uint64_t delivered = load_acquire(from.mail_in.reader->delivered_bytes);
  constexpr uint64_t kManyBytes = 128 << 10;
  if (head - from.told_head < from.mail_in.num_lines / 8 &&
      delivered - from.told_delivered < kManyBytes) {
    return;
  }
  FrameHeader frame;
  frame.kind = FrameKind::kMail;
  frame.word = from.told_head = head;
  frame.more = from.told_delivered = delivered;
  send(peer, frame, nullptr, Rest::stays());
}

void Proxy::tell_failure() {
  if (failure_told_) return;
  failure_told_ = true;
  const std::string bytes = failure_to_bytes(segment_);
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    if (is_remote(peer)) send_bytes(peer, FrameKind::kFailure, bytes);
  }
}

std::string Proxy::own_state(uint64_t sequence) const {
  WireWriter bytes;
  bytes.number(sequence);
  write_state(segment_, rank_, {&sequence, 1}, bytes);
  return bytes.bytes();
}

void Proxy::request_status(int peer, uint64_t sequence) {
  const std::lock_guard lock(host_links_->mutex());
  const std::string bytes = own_state(sequence);
  for (int rank = 0; rank < static_cast<int>(links_.size()); ++rank) {
    if (is_remote(rank) && (peer < 0 || peer == rank)) send_bytes(rank, FrameKind::kAsk, bytes);
  }
}

bool Proxy::fetch_record(int peer, uint64_t sequence, double timeout_s) {
  request_status(peer, sequence);
  const Deadline deadline = Deadline::after_s(timeout_s);
  while (segment_.records(peer).read_digest(sequence) == 0) {
    if (deadline.expired() || state_of(peer) != HostLinks::Peer::kThere) return false;
    poll(peer);
    nap(1'000'000);
  }
  return true;
}

}  // namespace pycoll
