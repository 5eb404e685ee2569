// How a rank writes memory that another core reads next.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace pycoll {

/// Decides, for one link, whether a rank writes through its caches or past them, by measuring both
/// (decision 0103). A write through the caches takes each line from the core that read it last.
/// That can be ten times slower than memory where the two cores share no cache; where they share
/// one, memory is the slower way. Private to the writing rank.
///
/// Each way keeps itself up. A write past the caches makes room in the reader's cache for the line,
/// which is still there when it is written again; then even near cores take five times as long to
/// write it through the caches. After one round of such writes the reader's cache has dropped the
/// lines before they are written again. So where writes go past the caches, a trial of the caches
/// lasts until its first block is written again, and that time counts.
class PeerStores {
 public:
  enum class Way : uint8_t { kMeasured, kCached, kPastCaches };
  struct Turn {
    bool past_caches = false;
    bool timed = false;  // took() follows
    uint64_t start = 0;  // ticks
    enum class Trial : uint8_t { kNone, kBegins, kGoesOn, kEnds } trial = Trial::kNone;
    const void* dst = nullptr;  // of a trial's first block
  };

  /// `way`: the only one, or by measurement. `bytes_of_round`: so many are written before a line is
  /// written again.
  explicit PeerStores(Way way = default_way(), size_t bytes_of_round = kMinRoundBytes)
      : blocks_of_round_(static_cast<uint32_t>(std::max(bytes_of_round, kMinRoundBytes) >> 13)),
        past_caches_(way == Way::kPastCaches),
        measures_(way == Way::kMeasured) {}

  /// The way that PYCOLL_PEER_STORES asks for.
  static Way default_way();

  /// How the next block, of `nbytes` at `dst`, is to be written. Short ones stay in the caches: a
  /// reader of memory waits longer for the first line.
  [[gnu::always_inline]] Turn next(const void* dst, size_t nbytes) {
    if (nbytes < kMinBytes) return {};
    if (measures_ && (++count_ == next_special_ || dst == trial_)) [[unlikely]]
      return special_turn(dst);
    return {past_caches_ && trial_ == nullptr};
  }
  /// Notes the time of a turn that is timed, when its stores have been fenced.
  void took(const Turn& turn, size_t nbytes);
  /// As took(), at a given time.
  void took(const Turn& turn, size_t nbytes, uint64_t end);
  /// Begins a trial of the caches with the next block, if writes go past them.
  void try_caches() {
    if (!past_caches_ || !measures_ || trial_ != nullptr) return;
    pause_left_ = 0;
    asked_ = true;
    next_special_ = count_ + 1;
  }
  /// Whether most writes go past the caches.
  bool past_caches() const { return past_caches_; }

  static constexpr size_t kMinBytes = 4096;
  static constexpr size_t kMinRoundBytes = 1 << 20;
  // In blocks. The other way is tried once in each period.
  static constexpr uint32_t kPeriod = 256;
  // The caches are timed more often while they are in use: they may become ten times slower.
  static constexpr uint32_t kCachedPeriod = 32;

 private:
  // By the first measurement all slots have been touched, which is slow in a way of its own.
  static constexpr uint32_t kFirst = kPeriod - 96;
  // The reader takes longer for what it does not find in a cache, which is not measured here.
  static constexpr float kMargin = 2.5F;
  // Where the cores share a cache, writes through the caches take at most this many times as long
  // (measured: up to 6 for lines that only the reader's cache has, up to 8.3 for lines that are in
  // no cache; 8 to 19 where they share none).
  static constexpr float kFarMargin = 9;
  // In blocks: the time between two looks whether a trial is hopeless.
  static constexpr uint32_t kTrialPeriod = 16;
  // Periods without a trial: twice as many after each trial that shows the caches to be slower.
  static constexpr uint32_t kMaxPause = 16;

  Turn special_turn(const void* dst);
  uint32_t next_period() const;
  /// Turns in a row that have to be slower by less than kFarMargin before the caches are left:
  /// those of a round. The reader may be about to drop the lines, or they have been in no cache.
  uint32_t slow_turns() const { return 2 * blocks_of_round_ / kCachedPeriod; }
  /// Blocks of the longest trial: a round, and some more.
  uint32_t max_trial() const { return blocks_of_round_ + blocks_of_round_ / 4; }
  void took_in_trial(const Turn& turn, float ticks_per_byte);

  uint32_t blocks_of_round_;  // of 8 KiB
  bool past_caches_;
  bool measures_;
  uint32_t count_ = kFirst;  // blocks
  uint32_t next_special_ = kFirst + 1;
  const void* trial_ = nullptr;  // the first block of the current trial
  uint32_t trial_began_ = 0;     // value of `count_`
  uint32_t pause_ = 0;           // periods
  uint32_t pause_left_ = 0;
  bool asked_ = false;     // for a trial
  uint32_t num_slow_ = 0;  // turns in a row
  // Ticks per byte of the last two turns through the caches, and past them. The faster one counts:
  // the kernel may interrupt any of them.
  float took_[2][2] = {{0, 0}, {0, 0}};
};

}  // namespace pycoll
