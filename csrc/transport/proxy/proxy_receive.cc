// The receiving half of the proxy: frames from remote ranks.
#include <algorithm>
#include <cstring>

#include "transport/proxy/proxy.h"
#include "transport/proxy/state_snapshot.h"
#include "transport/ring/line.h"

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

void Proxy::joined(int world_peer) { link(rank_of(world_peer)).joined = true; }

bool Proxy::take_heads(int peer, const FrameHeader& header) {
  Link& to = link(peer);
  for (int kind = 0; kind < kNumSlotProtocols; ++kind) {
    uint64_t& head = to.out[kind].heads[0].value;
    const uint64_t known = load_relaxed(head);
    const uint64_t told = widen(header.heads[kind], known);
    if (told < known || told > to.posted[kind]) return false;
    // Pairs with SendEnd::has_free_slot, as the reader's own release would.
    if (told != known) store_release(head, told);
  }
  return true;
}

bool Proxy::place(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged,
                  PayloadParts* parts) {
  const int peer = rank_of(world_peer);
  if (header.kind == FrameKind::kSlot) return place_slot(peer, header, staged, parts);
  if (header.kind == FrameKind::kLines) return place_lines(peer, header, staged, parts);
  if (header.nbytes > kMaxPayloadBytes) return false;
  staged.resize(std::max<size_t>(staged.size(), header.nbytes));
  *parts = {1, {staged.data()}, {header.nbytes}};
  return true;
}

bool Proxy::place_slot(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                       PayloadParts* parts) {
  if (header.protocol >= kNumSlotProtocols) return false;
  Link& from = link(peer);
  const RingMemory& ring = from.in[header.protocol];
  const uint64_t index = from.received[header.protocol];
  // Acquires the reader's release of the slot's previous message.
  const uint64_t head = load_acquire(ring.heads[0].value);
  if (header.sequence != static_cast<uint32_t>(index + 1) ||
      index - head >= static_cast<uint64_t>(ring.num_slots) || header.nbytes > ring.slot_bytes) {
    return false;
  }
  std::byte* to = ring.slots + index % static_cast<uint64_t>(ring.num_slots) * ring.slot_bytes;
  if (static_cast<ProtocolKind>(header.protocol) == ProtocolKind::kLL) {
    const size_t num_lines = (header.nbytes + CpuLine::kPayloadBytes - 1) / CpuLine::kPayloadBytes;
    if (num_lines * sizeof(CpuLine) > ring.slot_bytes) return false;
    staged.resize(std::max<size_t>(staged.size(), header.nbytes));
    to = staged.data();
  }
  *parts = {1, {to}, {header.nbytes}};
  return true;
}

void Proxy::unload_slot(int peer, const FrameHeader& header, const std::vector<std::byte>& staged) {
  Link& from = link(peer);
  const RingMemory& ring = from.in[header.protocol];
  const uint64_t index = from.received[header.protocol]++;
  const uint64_t slot = index % static_cast<uint64_t>(ring.num_slots);
  if (static_cast<ProtocolKind>(header.protocol) == ProtocolKind::kLL) {
    auto* line = reinterpret_cast<CpuLine*>(ring.slots + slot * ring.slot_bytes);
    const uint64_t flag = CpuLine::flag_of(index + 1, header.mark);
    for (size_t at = 0; at < header.nbytes; at += CpuLine::kPayloadBytes, ++line) {
      std::memcpy(line->payload, staged.data() + at,
                  std::min(CpuLine::kPayloadBytes, static_cast<size_t>(header.nbytes) - at));
      store_release(line->flag, flag);
    }
  } else {
    set_mark(*ring.tail, slot, header.mark);
    store_release(ring.tail->value, index + 1);  // pairs with RecvEnd::has_full_slot
  }
  // A rank that has already left its call would not notice that this call differs.
  const uint64_t newest = load_acquire(segment_.control(rank_).sequence);
  const uint64_t call = widen(header.call, newest);
  const uint32_t own = call <= newest ? segment_.records(rank_).read_digest(call) : 0;
  if (own != 0 && own != header.mark) request_status(peer, call);
}

bool Proxy::place_lines(int peer, const FrameHeader& header, std::vector<std::byte>& staged,
                        PayloadParts* parts) {
  const Link& from = link(peer);
  const uint64_t total = from.mail_in.num_lines;
  const uint64_t first = from.unloaded & (total - 1);
  const uint64_t num_lines = header.nbytes / sizeof(CpuLine);
  if (header.word != from.unloaded || header.nbytes % sizeof(CpuLine) != 0 || num_lines == 0 ||
      first + num_lines > total ||
      from.unloaded + num_lines - load_acquire(from.mail_in.reader->head) > total) {
    return false;
  }
  // The header contains the flag that publishes the message, so it is staged and written last.
  staged.resize(std::max(staged.size(), sizeof(CpuLine)));
  std::byte* body = reinterpret_cast<std::byte*>(from.mail_in.lines + first + 1);
  *parts = {2, {staged.data(), body}, {sizeof(CpuLine), header.nbytes - sizeof(CpuLine)}};
  return true;
}

void Proxy::unload_lines(int peer, const std::vector<std::byte>& staged) {
  Link& from = link(peer);
  MessageHeader came;
  std::memcpy(&came, staged.data(), sizeof(came));
  const uint64_t mask = from.mail_in.num_lines - 1;
  MessageHeader* to = &from.mail_in.lines[from.unloaded & mask];
  const size_t past_flag = sizeof(came.flag);
  std::memcpy(reinterpret_cast<std::byte*>(to) + past_flag, staged.data() + past_flag,
              sizeof(CpuLine) - past_flag);
  from.unloaded += came.num_lines;
  // As MailboxWriter::commit.
  store_relaxed(from.mail_in.lines[from.unloaded & mask].flag, 0);
  store_release(to->flag, from.unloaded);
}

void Proxy::arrived(int world_peer, const FrameHeader& header, std::vector<std::byte>& staged) {
  const int peer = rank_of(world_peer);
  if (peer < 0) return;
  take_heads(peer, header);
  Link& from = link(peer);
  switch (header.kind) {
    case FrameKind::kSlot:
      unload_slot(peer, header, staged);
      break;
    case FrameKind::kLines:
      unload_lines(peer, staged);
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
      hear_state(peer, header, staged);
      break;
    case FrameKind::kFailure:
      hear_failure(header, staged);
      break;
    case FrameKind::kCredit:
    case FrameKind::kHeartbeat:
      break;
  }
  segment_.ring_message_bell(rank_);
}

void Proxy::hear_state(int peer, const FrameHeader& header, const std::vector<std::byte>& staged) {
  try {
    WireReader reader(as_text(staged, header.nbytes));
    const auto sequence = reader.number<uint64_t>();
    read_state(
        segment_, reader, [peer](int rank) { return rank == peer; },
        [&](int rank, const CallRecord& record) {
          if (rank == peer) compare(peer, record);
        });
    if (header.kind == FrameKind::kAsk) send_bytes(peer, FrameKind::kTell, own_state(sequence));
  } catch (const MalformedMessage&) {
    // A state only helps diagnosis, so ignore a malformed one; malformed slots end the link.
  }
}

void Proxy::compare(int peer, const CallRecord& record) {
  const uint32_t own = segment_.records(rank_).read_digest(record.sequence);
  if (own == 0 || own == record.digest) return;
  segment_.fail({.code = FailureCode::kMismatch,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(peer)});
}

void Proxy::hear_failure(const FrameHeader& header, const std::vector<std::byte>& staged) {
  try {
    const Failure failure = failure_from_bytes(segment_, as_text(staged, header.nbytes),
                                               [this](int rank) { return is_remote(rank); });
    failure_told_ = true;  // the sender has told every rank
    segment_.fail(failure);
  } catch (const MalformedMessage&) {
    segment_.fail({.code = FailureCode::kAborted, .reporter = static_cast<uint16_t>(rank_)});
  }
}

}  // namespace pycoll
