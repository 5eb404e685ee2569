#include "transport/ring/segment.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>

#include "base/error.h"
#include "base/pages.h"
#include "base/slot_bytes.h"
#include "transport/proxy/proxy.h"

namespace pycoll {
namespace {

static_assert(sizeof(SegmentHeader) <= kPage);
static_assert(kSlotInPage % kFlagBytes == 0, "slots are whole pairs of lines");

// A rank has one ring to each rank; its ring to itself is the multicast ring, with one head per
// rank. A tail and num_ranks heads for every ring keep the layout uniform.
size_t flag_lines_per_ring(int num_ranks) { return 1 + static_cast<size_t>(num_ranks); }

constexpr size_t kShortRingBytes = round_up(kNumShortSlots * kShortSlotBytes, kPage);

}  // namespace

void check_num_ranks(int num_ranks) {
  if (num_ranks >= 1 && num_ranks <= kMaxRanks) return;
  throw UsageError("a communicator has 1 to " + std::to_string(kMaxRanks) + " ranks, asked for " +
                   std::to_string(num_ranks));
}

uint64_t Failure::pack() const {
  return static_cast<uint64_t>(code) | static_cast<uint64_t>(signal) << 8 |
         static_cast<uint64_t>(reporter) << 16 | static_cast<uint64_t>(culprit) << 32 |
         static_cast<uint64_t>(message) << 48;
}

Failure Failure::unpack(uint64_t word) {
  return {static_cast<FailureCode>(word & 0xff), static_cast<uint8_t>(word >> 8),
          static_cast<uint16_t>(word >> 16), static_cast<uint16_t>(word >> 32),
          static_cast<uint16_t>(word >> 48)};
}

SegmentLayout SegmentLayout::for_ranks(int num_ranks, bool several_hosts) {
  SegmentLayout layout;
  layout.num_ranks = num_ranks;
  layout.several_hosts = several_hosts;
  const auto n = static_cast<size_t>(num_ranks);
  // Smaller for large worlds, which have n squared rings.
  const size_t simple_bytes = several_hosts ? kSlotBytesBetweenHosts : kSlotBytes;
  constexpr auto kSimple = static_cast<size_t>(ProtocolKind::kSimple);
  constexpr auto kLL = static_cast<size_t>(ProtocolKind::kLL);
  layout.slot_bytes[kSimple] = n <= 16 ? simple_bytes : 32 << 10;
  layout.slot_bytes[kLL] = n <= 16 ? 8 << 10 : 4 << 10;
  if (n <= 16 && !several_hosts) {
    layout.turn_bytes[kSimple] =
        std::bit_floor(kBytesBetweenWrites / kMaxSlots / std::max<size_t>(n - 1, 1));
  }
  for (size_t kind = 0; kind < kNumSlotProtocols; ++kind) {
    layout.stride_bytes[kind] = std::max(layout.slot_bytes[kind], layout.turn_bytes[kind]);
  }
  layout.controls = kPage;
  layout.records = layout.controls + round_up(n * sizeof(RankControl), kPage);
  layout.names = layout.records + n * RecordRing::kBytes;
  layout.exchanges = layout.names + n * NameTable::kBytes;
  layout.flags = layout.exchanges + round_up(n * sizeof(ExchangeMemory), kPage);
  layout.slots =
      layout.flags +
      round_up(kNumSlotProtocols * n * n * flag_lines_per_ring(num_ranks) * sizeof(FlagLine),
               kPage) +
      kSlotInPage;
  layout.total_bytes = layout.slots;
  for (size_t bytes : layout.stride_bytes) {
    layout.total_bytes += n * n * static_cast<size_t>(layout.num_slots) * bytes;
  }
  layout.short_slots = round_up(layout.total_bytes, kPage);
  layout.total_bytes = layout.short_slots + n * n * kShortRingBytes;
  layout.settings = layout.total_bytes;
  layout.total_bytes += Segment::kSettingsBytes;
  layout.message_records = layout.total_bytes;
  layout.message_ends = layout.message_records + n * MessageRing::kBytes;
  layout.mailboxes = layout.message_ends +
                     round_up(n * (sizeof(PeerMemoryAddress) + sizeof(MessageMismatch)), kPage);
  layout.total_bytes = layout.mailboxes + MailboxLayout::total_bytes(num_ranks);
  return layout;
}

std::string SegmentLayout::name() {
  uint64_t digest = 1469598103934665603u;  // FNV-1a
  const auto add = [&digest](uint64_t value) { digest = (digest ^ value) * 1099511628211u; };
  for (const size_t size :
       {sizeof(SegmentHeader), sizeof(RankControl), sizeof(SegmentSettings), sizeof(MessageHeader),
        sizeof(MailboxReaderState), sizeof(FrameHeader), kMaxPayloadBytes}) {
    add(size);
  }
  for (const auto& layout : {for_ranks(2), for_ranks(2, true), for_ranks(kMaxRanks)}) {
    for (const size_t bytes : layout.slot_bytes) add(bytes);
    for (const size_t bytes : layout.turn_bytes) add(bytes);
    for (const size_t offset :
         {layout.controls, layout.records, layout.names, layout.exchanges, layout.flags,
          layout.slots, layout.short_slots, layout.settings, layout.message_records,
          layout.message_ends, layout.mailboxes, layout.total_bytes}) {
      add(offset);
    }
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%u.%08x", static_cast<unsigned>(SegmentHeader::kVersion),
                static_cast<unsigned>(digest ^ digest >> 32));
  return text;
}

RankControl& Segment::control(int rank) const {
  return reinterpret_cast<RankControl*>(base_ + layout_.controls)[rank];
}

int Segment::num_cores() const {
  return reinterpret_cast<const SegmentSettings*>(base_ + layout_.settings)->num_cores;
}

std::string_view Segment::settings_text() const {
  const auto* settings = reinterpret_cast<const SegmentSettings*>(base_ + layout_.settings);
  return {reinterpret_cast<const char*>(settings + 1), settings->text_bytes};
}

ExchangeMemory& Segment::exchange(int rank) const {
  return reinterpret_cast<ExchangeMemory*>(base_ + layout_.exchanges)[rank];
}

RingMemory Segment::ring(ProtocolKind protocol, int src, int dst) const {
  const auto n = static_cast<size_t>(layout_.num_ranks);
  const size_t pair = static_cast<size_t>(src) * n + static_cast<size_t>(dst);
  const auto kind = static_cast<size_t>(protocol);
  RingMemory memory;
  memory.num_slots = layout_.num_slots;
  memory.slot_bytes = layout_.slot_bytes[kind];
  memory.stride_bytes = layout_.stride_bytes[kind];
  memory.turn_bytes = layout_.turn_bytes[kind];
  memory.slots = base_ + layout_.slots + pair * memory.num_slots * memory.stride_bytes;
  if (protocol == ProtocolKind::kLL) {
    memory.slots += n * n * static_cast<size_t>(layout_.num_slots) * layout_.stride_bytes[0];
  } else {
    memory.short_slots = base_ + layout_.short_slots + pair * kShortRingBytes;
  }
  if (ranks_share_cores()) memory.num_marks = kNumShortSlots;
  auto* lines = reinterpret_cast<FlagLine*>(base_ + layout_.flags) +
                (kind * n * n + pair) * flag_lines_per_ring(layout_.num_ranks);
  memory.tail = lines;
  memory.heads = lines + 1;
  memory.num_heads = 1;
  return memory;
}

void RingMemory::map_turns() const {
  for (uint64_t i = 0; i < static_cast<uint64_t>(num_slots); ++i) populate(slot(i), turn_bytes);
}

RecordRing Segment::records(int rank) const {
  return RecordRing(base_ + layout_.records + static_cast<size_t>(rank) * RecordRing::kBytes);
}

NameTable Segment::names(int rank) const {
  return NameTable(base_ + layout_.names + static_cast<size_t>(rank) * NameTable::kBytes);
}

void Segment::introduce(std::string_view name) const {
  SegmentHeader& to = header();
  // Every rank writes the same values.
  store_relaxed(to.version, SegmentHeader::kVersion);
  store_relaxed(to.num_ranks, static_cast<uint64_t>(num_ranks()));
  store_relaxed(to.total_bytes, layout_.total_bytes);
  store_relaxed(to.several_hosts, uint64_t{layout_.several_hosts});
  if (claim(to.name_claim, 1)) {
    const size_t size = std::min(name.size(), SegmentHeader::kMaxName);
    std::memcpy(to.name, name.data(), size);
    store_release(to.name_size, size);
  }
  if (claim(to.tick_claim, 1)) {
    const TickMoment now = TickMoment::now(has_steady_counter());
    store_relaxed(to.tick_ticks, now.ticks);
    store_release(to.tick_ns, static_cast<uint64_t>(now.ns));
  }
  store_release(to.magic, SegmentHeader::kMagic);
}

TickScale Segment::tick_scale() const {
  const TickMoment now = TickMoment::now(has_steady_counter());
  const auto ns = static_cast<int64_t>(load_acquire(header().tick_ns));
  if (ns == 0) return {now, now};
  return {{load_relaxed(header().tick_ticks), ns}, now};
}

void Segment::ring_bell(int rank) const {
  RankControl& control = this->control(rank);
  // Relaxed on purpose: a wakeup missed because the store of the flag is not visible yet costs at
  // most one sleep (executor/wait/wait.cc), cheaper than a fence on every message.
  if (std::atomic_ref<uint32_t>(control.asleep).load(std::memory_order_relaxed) == 0) return;
  std::atomic_ref<uint32_t>(control.bell).fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, &control.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::ring_message_bell(int rank) const {
  if (proxy_ != nullptr && proxy_->is_remote(rank)) [[unlikely]]
    return proxy_->ring(rank);
  ring_bell(rank);
  RankControl& control = this->control(rank);
  if (std::atomic_ref<uint32_t>(control.message_asleep).load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::atomic_ref<uint32_t>(control.message_bell).fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, &control.message_bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::nap_for_message(int rank, bool listens) const {
  RankControl& control = this->control(rank);
  const std::atomic_ref<uint32_t> asleep(control.message_asleep);
  const uint32_t heard =
      std::atomic_ref<uint32_t>(control.message_bell).load(std::memory_order_acquire);
  const timespec length{0, 1'000'000};
  if (listens) asleep.store(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &control.message_bell, FUTEX_WAIT, heard, &length, nullptr, 0);
  if (listens) asleep.store(0, std::memory_order_relaxed);
}

void Segment::ring_all_bells() const {
  for (int rank = 0; rank < num_ranks(); ++rank) ring_message_bell(rank);
}

void Segment::fail(const Failure& failure) const {
  claim(failure_word(), failure.pack());
  ring_all_bells();
}

void Segment::revoke(int rank, std::string_view reason) const {
  if (load_acquire(failure_word()) != 0) return;
  names(rank).write(NameTable::kReason, reason);
  fail({.code = FailureCode::kRevoked,
        .reporter = static_cast<uint16_t>(rank),
        .culprit = static_cast<uint16_t>(rank),
        .message = NameTable::kReason});
}

}  // namespace pycoll
