#include "transport/segment.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstring>

namespace pycoll {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kRecordWords = sizeof(CallRecord) / sizeof(uint64_t);
static_assert(sizeof(CallRecord) % sizeof(uint64_t) == 0);

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Rings of one rank: a link to each rank, where the link to itself is the multicast ring, whose
// heads are one per rank. A tail and num_ranks heads for each keeps the arithmetic in one line.
size_t flag_lines_per_ring(int num_ranks) { return 1 + static_cast<size_t>(num_ranks); }

}  // namespace

uint32_t CallRecord::digest() const {
  // FNV-1a over what must agree. `algorithm` is in: ranks that ask for different ones would wait
  // for each other forever.
  uint64_t hash = 1469598103934665603ull;
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
  mix(sequence);
  mix(collective | (dtype << 8) | (op << 16) | (static_cast<uint64_t>(num_dims) << 24));
  mix(static_cast<uint64_t>(root));
  mix(static_cast<uint64_t>(count));
  for (int i = 0; i < num_dims && i < 6; ++i) mix(static_cast<uint64_t>(shape[i]));
  if (algorithm[0] != 0) {
    uint64_t words[sizeof(algorithm) / 8];
    std::memcpy(words, algorithm, sizeof(algorithm));
    for (uint64_t word : words) mix(word);
  }
  const auto folded = static_cast<uint32_t>(hash ^ (hash >> 32));
  return folded == 0 ? 1 : folded;
}

uint64_t Failure::pack() const {
  return static_cast<uint64_t>(code) | static_cast<uint64_t>(signal) << 8 |
         static_cast<uint64_t>(reporter) << 16 | static_cast<uint64_t>(culprit) << 32;
}

Failure Failure::unpack(uint64_t word) {
  return {static_cast<FailureCode>(word & 0xff), static_cast<uint8_t>(word >> 8),
          static_cast<uint16_t>(word >> 16), static_cast<uint16_t>(word >> 32)};
}

SegmentLayout SegmentLayout::for_ranks(int num_ranks) {
  SegmentLayout layout;
  layout.num_ranks = num_ranks;
  const auto n = static_cast<size_t>(num_ranks);
  // Slots that stay in a core's L2 together with the user's tile; smaller for large worlds, whose
  // rings are n squared.
  layout.slot_bytes[static_cast<int>(ProtocolKind::kSimple)] = n <= 16 ? 128 << 10 : 32 << 10;
  layout.slot_bytes[static_cast<int>(ProtocolKind::kLL)] = n <= 16 ? 8 << 10 : 4 << 10;
  layout.controls = kPage;
  layout.records = layout.controls + round_up(n * sizeof(RankControl), kPage);
  layout.flags = layout.records + round_up(n * Segment::kNumRecords * sizeof(CallRecord), kPage);
  layout.slots =
      layout.flags +
      round_up(kNumProtocols * n * n * flag_lines_per_ring(num_ranks) * sizeof(FlagLine), kPage);
  layout.total_bytes = layout.slots;
  for (size_t bytes : layout.slot_bytes) {
    layout.total_bytes += n * n * static_cast<size_t>(layout.num_slots) * bytes;
  }
  layout.settings = layout.total_bytes;
  layout.total_bytes += Segment::kSettingsBytes;
  return layout;
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

RingMemory Segment::ring(ProtocolKind protocol, int src, int dst) const {
  const auto n = static_cast<size_t>(layout_.num_ranks);
  const size_t pair = static_cast<size_t>(src) * n + static_cast<size_t>(dst);
  const auto kind = static_cast<size_t>(protocol);
  RingMemory memory;
  memory.num_slots = layout_.num_slots;
  memory.slot_bytes = layout_.slot_bytes[kind];
  memory.slots = base_ + layout_.slots + pair * memory.num_slots * memory.slot_bytes;
  if (protocol == ProtocolKind::kLL) {
    memory.slots += n * n * static_cast<size_t>(layout_.num_slots) * layout_.slot_bytes[0];
  }
  auto* lines = reinterpret_cast<FlagLine*>(base_ + layout_.flags) +
                (kind * n * n + pair) * flag_lines_per_ring(layout_.num_ranks);
  memory.tail = lines;
  memory.heads = lines + 1;
  memory.num_heads = 1;
  return memory;
}

void Segment::publish(int rank, const CallRecord& record) const {
  auto* records = reinterpret_cast<uint64_t*>(base_ + layout_.records);
  uint64_t* to =
      records +
      (static_cast<size_t>(rank) * kNumRecords + record.sequence % kNumRecords) * kRecordWords;
  uint64_t words[kRecordWords];
  std::memcpy(words, &record, sizeof(record));
  // Word 0 is the sequence number: cleared first, so that a reader never takes a half-written
  // record for a whole one (it reads the number before and after).
  store_release(to[0], 0);
  for (size_t i = 1; i < kRecordWords; ++i) store_release(to[i], words[i]);
  store_release(to[0], words[0]);
  store_release(control(rank).sequence, record.sequence);
}

bool Segment::read_record(int rank, uint64_t sequence, CallRecord* record) const {
  auto* records = reinterpret_cast<uint64_t*>(base_ + layout_.records);
  const uint64_t* from =
      records + (static_cast<size_t>(rank) * kNumRecords + sequence % kNumRecords) * kRecordWords;
  uint64_t words[kRecordWords];
  words[0] = load_acquire(from[0]);
  if (words[0] != sequence) return false;
  for (size_t i = 1; i < kRecordWords; ++i) words[i] = load_acquire(from[i]);
  if (load_acquire(from[0]) != sequence) return false;
  std::memcpy(record, words, sizeof(words));
  return true;
}

void Segment::ring_bell(int rank) const {
  RankControl& control = this->control(rank);
  // Relaxed on purpose: a wake-up that is missed because the store of the flag is still on its way
  // costs one nap (executor/wait.cc), which is shorter than a fence on every message is dear.
  if (std::atomic_ref<uint32_t>(control.asleep).load(std::memory_order_relaxed) == 0) return;
  std::atomic_ref<uint32_t>(control.bell).fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, &control.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::ring_all_bells() const {
  for (int rank = 0; rank < num_ranks(); ++rank) ring_bell(rank);
}

void Segment::fail(const Failure& failure) const {
  claim(failure_word(), failure.pack());
  ring_all_bells();
}

}  // namespace pycoll
