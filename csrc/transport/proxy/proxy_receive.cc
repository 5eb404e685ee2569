// The receiving half of the proxy: frames from remote ranks.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "transport/proxy/proxy.h"
#include "transport/proxy/state_snapshot.h"
#include "transport/ring/line.h"
#include "transport/transport.h"

namespace pycoll {
namespace {

/// The number with these low bits that is nearest to `about`.
uint64_t widen(uint32_t low, uint64_t about) {
  return about + static_cast<uint64_t>(static_cast<int64_t>(
                     static_cast<int32_t>(low - static_cast<uint32_t>(about))));
}

std::string_view as_text(const std::vector<std::byte>& bytes, size_t nbytes) {
  return {reinterpret_cast<const char*>(bytes.data()), nbytes};
}

}  // namespace

void Proxy::joined(int world_peer) {
  const int peer = remote_member(world_peer);
  if (peer >= 0) link(peer).joined = true;
}

void Proxy::rejected(int world_peer) {
  const int peer = remote_member(world_peer);
  if (peer < 0) return;
  segment_.fail({.code = FailureCode::kPeerDied,
                 .signal = Transport::kInvalidFrame,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(peer)});
}

/// Whether the peer has read at least what it had read before, and at most what this rank posted.
bool Proxy::has_valid_heads(int peer, const FrameHeader& header) const {
  const Link& to = link(peer);
  for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
    const uint64_t known = load_relaxed(to.out[kind].heads[0].value);
    if (header.heads[kind] - static_cast<uint32_t>(known) > to.posted[kind] - known) return false;
  }
  return true;
}

void Proxy::take_heads(int peer, const FrameHeader& header) {
  Link& to = link(peer);
  for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
    uint64_t& head = to.out[kind].heads[0].value;
    const uint64_t known = load_relaxed(head);
    const uint64_t told = widen(header.heads[kind], known);
    // Pairs with SendEnd::has_free_slot, as the reader's own release would.
    if (told != known) store_release(head, told);
  }
}

/// As has_valid_heads(), for the mailbox.
bool Proxy::has_valid_mail(int peer, const FrameHeader& header) const {
  const Link& to = link(peer);
  const MailboxReaderState& reader = *to.mail_out.reader;
  return header.word >= load_relaxed(reader.head) && header.word <= to.shipped &&
         header.more >= load_relaxed(reader.delivered_bytes) &&
         header.more <= to.shipped_eager_bytes;
}

bool Proxy::place(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged,
                  PayloadParts* parts) {
  const int peer = remote_member(world_peer);
  if (peer < 0 || !has_valid_heads(peer, header)) return false;
  if (header.kind == FrameKind::kSlot) return place_slot(peer, header, staged, parts);
  if (header.kind == FrameKind::kLines) return place_lines(peer, header, staged, parts);
  if (header.kind == FrameKind::kMail) return has_valid_mail(peer, header);
  if (header.nbytes == 0) return true;
  staged.resize(std::max<size_t>(staged.size(), header.nbytes));
  *parts = {1, {staged.data()}, {header.nbytes}};
  return true;
}

bool Proxy::place_slot(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                       PayloadParts* parts) {
  Link& from = link(peer);
  const RingMemory& ring = from.in[header.protocol];
  const uint64_t index = from.received[header.protocol];
  // Acquires the reader's release of the slot's previous message.
  const uint64_t head = load_acquire(ring.heads[0].value);
  if (header.sequence != static_cast<uint32_t>(index + 1) ||
      index - head >= static_cast<uint64_t>(ring.num_slots) || header.nbytes > ring.slot_bytes) {
    return false;
  }
  std::byte* to = ring.slot(index);
  if (static_cast<ProtocolKind>(header.protocol) == ProtocolKind::kLL) {
    const size_t num_lines = (header.nbytes + CpuLine::kPayloadBytes - 1) / CpuLine::kPayloadBytes;
    if (num_lines * sizeof(CpuLine) > ring.slot_bytes) return false;
    staged.resize(std::max<size_t>(staged.size(), header.nbytes));
    to = staged.data();
  } else {
    std::byte* elsewhere = nullptr;
    if (header.nbytes >= kLongPayloadBytes) {
      from.in_expected = is_expected(from.expected, header);
      elsewhere = from.in_expected ? from.expected.memory : place_long(from, index, head);
    }
    from.elsewhere[index % static_cast<uint64_t>(ring.num_slots)] = elsewhere;
    if (elsewhere != nullptr) to = elsewhere;
  }
  *parts = {1, {to}, {header.nbytes}};
  return true;
}

void Proxy::expect(int peer, const Expected& expected) {
  const std::lock_guard lock(host_links_->mutex());
  link(peer).expected = expected;
}

void Proxy::expect_no_more(int peer) {
  const std::lock_guard lock(host_links_->mutex());
  Link& from = link(peer);
  from.expected = {};
  if (!from.in_expected) return;
  host_links_->discard_rest(members_[static_cast<size_t>(peer)]);
  from.in_expected = false;
}

bool Proxy::is_expected(const Expected& expected, const FrameHeader& header) {
  return expected.memory != nullptr && header.nbytes == expected.nbytes &&
         header.mark == expected.mark &&
         header.sequence == static_cast<uint32_t>(expected.sequence);
}

/// Where a long message goes: to memory of a message that its reader has released. The last such
/// memory is in the nearest cache, and a reader that keeps up needs no other. Null: there is none.
std::byte* Proxy::place_long(Link& from, uint64_t index, uint64_t head) {
  const auto num_slots =
      static_cast<uint64_t>(from.in[static_cast<size_t>(ProtocolKind::kSimple)].num_slots);
  std::unique_ptr<FrameMemory>& memory = from.long_messages[index % num_slots];
  const uint64_t oldest = index - std::min(index, num_slots);
  for (uint64_t at = head; at-- > oldest;) {
    std::unique_ptr<FrameMemory>& released = from.long_messages[at % num_slots];
    if (released == nullptr) continue;
    memory.swap(released);
    break;
  }
  if (memory == nullptr) memory.reset(new (std::nothrow) FrameMemory);
  return memory == nullptr ? nullptr : memory->payload();
}

bool Proxy::swap_memory(int world_peer, const FrameHeader& header,
                        std::unique_ptr<FrameMemory>& memory) {
  if (header.kind != FrameKind::kSlot ||
      static_cast<ProtocolKind>(header.protocol) != ProtocolKind::kSimple) {
    return false;
  }
  Link& from = link(remote_member(world_peer));
  const RingMemory& ring = from.in[header.protocol];
  const uint64_t slot = from.received[header.protocol] % static_cast<uint64_t>(ring.num_slots);
  if (from.elsewhere[slot] == nullptr || from.in_expected) return false;
  from.elsewhere[slot] = memory->payload();
  from.long_messages[slot].swap(memory);
  return true;
}

void Proxy::unload_slot(int peer, const FrameHeader& header, const std::vector<std::byte>& staged) {
  Link& from = link(peer);
  const RingMemory& ring = from.in[header.protocol];
  const uint64_t index = from.received[header.protocol]++;
  from.in_expected = false;
  if (static_cast<ProtocolKind>(header.protocol) == ProtocolKind::kLL) {
    auto* line = reinterpret_cast<CpuLine*>(ring.slot(index));
    const uint64_t flag = CpuLine::flag_of(index + 1, header.mark);
    for (size_t at = 0; at < header.nbytes; at += CpuLine::kPayloadBytes, ++line) {
      std::memcpy(line->payload, staged.data() + at,
                  std::min(CpuLine::kPayloadBytes, static_cast<size_t>(header.nbytes) - at));
      store_release(line->flag, flag);
    }
  } else {
    set_mark(*ring.tail, index % ring.num_marks, header.mark);
    store_release(ring.tail->value, index + 1);  // pairs with RecvEnd::has_full_slot
  }
  // A rank that has already left its call would not notice that this call differs.
  const uint64_t newest = load_acquire(segment_.control(rank_).sequence);
  const uint64_t call = widen(header.call, newest);
  const uint32_t own = call <= newest ? segment_.records(rank_).read_digest(call) : 0;
  if (own != 0 && own != header.mark) request_status(peer, call);
}

/// Whether the reader has released enough lines for these, and for the flag of the line behind.
bool Proxy::has_room_for_lines(const Link& from, uint64_t num_lines) {
  return from.unloaded + num_lines + 1 - load_acquire(from.mail_in.reader->head) <=
         from.mail_in.num_lines;
}

bool Proxy::place_lines(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                        PayloadParts* parts) {
  const Link& from = link(peer);
  const uint64_t total = from.mail_in.num_lines;
  const uint64_t first = from.unloaded & (total - 1);
  const uint64_t num_lines = header.nbytes / sizeof(CpuLine);
  if (header.word != from.unloaded || first + num_lines > total ||
      !has_room_for_lines(from, num_lines)) {
    return false;
  }
  // The header contains the flag that publishes the message, so it is staged and written last.
  staged.resize(std::max(staged.size(), sizeof(CpuLine)));
  std::byte* body = reinterpret_cast<std::byte*>(from.mail_in.lines + first + 1);
  *parts = {2, {staged.data(), body}, {sizeof(CpuLine), header.nbytes - sizeof(CpuLine)}};
  return true;
}

bool Proxy::unload_lines(int peer, const FrameHeader& header,
                         const std::vector<std::byte>& staged) {
  Link& from = link(peer);
  MessageHeader came;
  std::memcpy(&came, staged.data(), sizeof(came));
  const uint64_t mask = from.mail_in.num_lines - 1;
  const uint64_t first = from.unloaded & mask;
  if (!is_valid(came, header.nbytes / sizeof(CpuLine), from.mail_in.num_lines - first) ||
      !has_room_for_lines(from, came.num_lines)) {
    return false;
  }
  MessageHeader* to = &from.mail_in.lines[first];
  const size_t past_flag = sizeof(came.flag);
  std::memcpy(reinterpret_cast<std::byte*>(to) + past_flag, staged.data() + past_flag,
              sizeof(CpuLine) - past_flag);
  from.unloaded += came.num_lines;
  // As MailboxWriter::commit.
  store_relaxed(from.mail_in.lines[from.unloaded & mask].flag, 0);
  store_release(to->flag, from.unloaded);
  return true;
}

bool Proxy::arrived(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged) {
  const int peer = remote_member(world_peer);
  take_heads(peer, header);
  Link& from = link(peer);
  bool is_valid = true;
  switch (header.kind) {
    case FrameKind::kSlot:
      unload_slot(peer, header, staged);
      break;
    case FrameKind::kLines:
      is_valid = unload_lines(peer, header, staged);
      break;
    case FrameKind::kMail:
      store_release(from.mail_out.reader->delivered_bytes, header.more);
      store_release(from.mail_out.reader->head, header.word);
      break;
    case FrameKind::kJoin:
      from.joined = true;
      break;
    case FrameKind::kLeft:
      store_release(from.peer_left, 1);
      store_release(segment_.control(peer).state, 2);
      break;
    case FrameKind::kAsk:
    case FrameKind::kTell:
      is_valid = hear_state(peer, header, staged);
      break;
    case FrameKind::kFailure:
      is_valid = hear_failure(header, staged);
      break;
    case FrameKind::kCredit:
    case FrameKind::kHeartbeat:
      break;
  }
  segment_.ring_message_bell(rank_);
  return is_valid;
}

bool Proxy::hear_state(int peer, const FrameHeader& header, const std::vector<std::byte>& staged) {
  try {
    WireReader reader(as_text(staged, header.nbytes));
    const auto sequence = reader.number<uint64_t>();
    read_state(
        segment_, reader, [peer](int rank) { return rank == peer; },
        [&](int rank, const CallRecord& record) {
          if (rank == peer) compare(peer, record);
        });
    reader.expect_end();
    if (header.kind == FrameKind::kAsk) send_bytes(peer, FrameKind::kTell, own_state(sequence));
  } catch (const MalformedMessage&) {
    return false;
  }
  return true;
}

void Proxy::compare(int peer, const CallRecord& record) {
  const uint32_t own = segment_.records(rank_).read_digest(record.sequence);
  if (own == 0 || own == record.digest) return;
  segment_.fail({.code = FailureCode::kMismatch,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(peer)});
}

bool Proxy::hear_failure(const FrameHeader& header, const std::vector<std::byte>& staged) {
  try {
    const Failure failure = failure_from_bytes(segment_, as_text(staged, header.nbytes),
                                               [this](int rank) { return is_remote(rank); });
    failure_told_ = true;  // the sender has told every rank
    segment_.fail(failure);
  } catch (const MalformedMessage&) {
    return false;
  }
  return true;
}

}  // namespace pycoll
