#include "executor/cpu/peer_loads.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/environment.h"
#include "base/ticks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pycoll {
namespace {

#if defined(__x86_64__)

bool has_flush() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kFlushOpt = 1u << 23;
  return has_steady_counter() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
         (b & kFlushOpt) != 0;
}

/// After all accesses before it.
uint64_t ticks_now() {
  _mm_mfence();
  _mm_lfence();
  return __rdtsc();
}

void flush(const std::byte* line) { asm volatile("clflushopt %0" : : "m"(*line) : "memory"); }

#else

bool has_flush() { return false; }
uint64_t ticks_now() { return 0; }
void flush(const std::byte*) {}

#endif

uint64_t ticks_of_load(const std::byte* line) {
  const uint64_t start = ticks_now();
  const auto loaded = *static_cast<const volatile std::byte*>(line);
  (void)loaded;
  return ticks_now() - start;
}

uint64_t lower_median(std::array<uint64_t, 8> values) {
  auto* const at = values.begin() + (values.size() - 1) / 2;
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

}  // namespace

PeerLoads::Way PeerLoads::default_way() {
  const auto asked = env_text("PYCOLL_PEER_LOADS");
  if (!asked || *asked == "measured") return Way::kMeasured;
  if (*asked == "claimed") return Way::kClaimed;
  return *asked == "kept" ? Way::kKept : Way::kReturned;
}

PeerLoads::PeerLoads(Segment& segment, int rank, int num_ranks, Way way)
    : segment_(segment),
      rank_(rank),
      num_ranks_(num_ranks),
      measures_(way == Way::kMeasured && has_flush() && num_ranks > 1),
      claims_(measures_ || way == Way::kClaimed),
      wants_lines_(way == Way::kReturned && has_flush()),
      peers_(static_cast<size_t>(num_ranks)) {}

int PeerLoads::reader_of(int owner) const {
  const auto round = static_cast<int>(num_trials_ % static_cast<uint32_t>(num_ranks_ - 1));
  return (owner + 1 + round) % num_ranks_;
}

void PeerLoads::write_lines(CacheLine* lines) const {
  for (int i = 0; i < TrialLines::kNumLines; ++i) store_relaxed(lines[i].value, num_trials_);
}

bool PeerLoads::enter() {
  if (!is_armed_ && !is_trial_) [[likely]]
    return wants_lines_;
  TrialLines& own = segment_.exchange(rank_).trial;
  if (is_armed_) {
    is_armed_ = false;
    const uint64_t start = ticks_now();
    write_lines(own.kept);
    const uint64_t middle = ticks_now();
    write_lines(own.returned);
    took(reader_of(rank_), middle - start, ticks_now() - middle);
    ++num_trials_;
  } else {
    write_lines(own.kept);
    write_lines(own.returned);
  }
  return wants_lines_;
}

void PeerLoads::entered(int64_t nbytes) {
  if (!measures_) return;
  if (!is_trial_) [[likely]] {
    until_trial_ -= 1 + nbytes / kBytesOfOne;
    is_trial_ = until_trial_ <= 0;
    return;
  }
  is_trial_ = false;
  is_armed_ = true;
  until_trial_ = kBetweenTrials;
  for (int owner = 0; owner < num_ranks_; ++owner) {
    if (owner == rank_ || reader_of(owner) != rank_) continue;
    const TrialLines& lines = segment_.exchange(owner).trial;
    Peer& peer = peers_[static_cast<size_t>(owner)];
    // Some lines come late, some are prefetched with others.
    std::array<uint64_t, 8> changed;
    std::array<uint64_t, 8> unchanged;
    constexpr int kLines[] = {36, 12, 52, 4, 44, 20, 60, 28};  // in an order that is no stream
    static_assert(*std::max_element(std::begin(kLines), std::end(kLines)) < TrialLines::kNumLines);
    for (size_t i = 0; i < changed.size(); ++i) {
      const auto* const line = reinterpret_cast<const std::byte*>(lines.kept + kLines[i]);
      changed[i] = ticks_of_load(line);
      unchanged[i] = ticks_of_load(line);
    }
    peer.changed.add(lower_median(changed));
    peer.unchanged.add(lower_median(unchanged));
    for (const CacheLine& line : lines.kept) (void)load_relaxed(line.value);
    for (const CacheLine& line : lines.returned) (void)load_relaxed(line.value);
    // Not together with the loads: that of a line may prefetch its flushed neighbour.
    for (const CacheLine& line : lines.returned) flush(reinterpret_cast<const std::byte*>(&line));
  }
}

void PeerLoads::took(int peer, uint64_t kept, uint64_t returned) {
  Peer& of = peers_[static_cast<size_t>(peer)];
  of.kept.add(kept);
  of.returned.add(returned);
  const float margin = wants_lines_ ? kMarginToKeep : kMarginToReturn;
  wants_lines_ = std::any_of(peers_.begin(), peers_.end(), [margin](const Peer& each) {
    return static_cast<float>(each.kept.get()) > margin * static_cast<float>(each.returned.get());
  });
}

bool PeerLoads::is_new(int owner, const std::byte* src, size_t nbytes) const {
  if (!measures_) return true;
  const Peer& peer = peers_[static_cast<size_t>(owner)];
  const uint64_t changed = peer.changed.get();
  if (changed == 0) return false;  // not measured yet
  // A new line of a large array comes from L3, a little sooner than from the owner's cache. Where
  // cores share one, a new line takes two steps of some clocks longer than an old one, and some old
  // ones take one step longer.
  return ticks_of_load(src + nbytes / 2) > (changed + peer.unchanged.get()) / 2;
}

void PeerLoads::give_back(const std::byte* src, size_t nbytes) {
  const auto address = reinterpret_cast<uintptr_t>(src);
  constexpr uintptr_t kLine = sizeof(CacheLine);
  constexpr uintptr_t kPair = 2 * kLine;  // the CPU prefetches, and evicts, pairs of lines
  const auto flush_lines = [](uintptr_t from, uintptr_t to) {
    for (; from < to; from += kLine) flush(reinterpret_cast<const std::byte*>(from));
  };
  // Lines that are only partly in the block stay, too.
  const uintptr_t middle = (address + nbytes / 2) / kPair * kPair;
  flush_lines((address + kLine - 1) / kLine * kLine, middle);
  flush_lines(middle + kPair, (address + nbytes) / kLine * kLine);
}

}  // namespace pycoll
