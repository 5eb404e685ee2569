// How a rank writes memory that another core reads next.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll {

/// Decides, for one link, whether a rank writes through its caches or past them, by measuring both
/// (decision 0103). A write through the caches takes each line from the core that read it last.
/// That can be ten times slower than memory where the two cores share no cache; where they share
/// one, memory is the slower way. Private to the writing rank.
class PeerStores {
 public:
  enum class Way : uint8_t { kMeasured, kCached, kPastCaches };
  struct Turn {
    bool past_caches = false;
    bool timed = false;  // took() follows
    uint64_t start = 0;  // ticks
  };

  /// `way`: the only one, or by measurement.
  explicit PeerStores(Way way = default_way())
      : past_caches_(way == Way::kPastCaches), measures_(way == Way::kMeasured) {}

  /// How the next block of `nbytes` is to be written. Short ones stay in the caches: a reader of
  /// memory waits longer for the first line.
  [[gnu::always_inline]] Turn next(size_t nbytes) {
    if (nbytes < kMinBytes) return {};
    if (measures_ && ++count_ % (past_caches_ ? kPeriod : kCachedPeriod) <= 1) [[unlikely]]
      return timed_turn();
    return {past_caches_};
  }
  /// Notes the time of a turn that is timed, when its stores have been fenced.
  void took(const Turn& turn, size_t nbytes);
  /// As took(), at a given time.
  void took(const Turn& turn, size_t nbytes, uint64_t end);
  /// Whether most writes go past the caches.
  bool past_caches() const { return past_caches_; }

  static constexpr size_t kMinBytes = 4096;
  // In blocks. The other way is tried once in each period: the slow one takes a thirtieth of the
  // time.
  static constexpr uint32_t kPeriod = 256;
  // The caches are timed more often while they are in use: they may become ten times slower.
  static constexpr uint32_t kCachedPeriod = 32;

 private:
  // By the first measurement all slots have been touched, which is slow in a way of its own.
  static constexpr uint32_t kFirst = kPeriod - 96;
  // The reader takes longer for what it does not find in a cache, which is not measured here.
  static constexpr float kMargin = 2.5F;

  static Way default_way();
  /// The other way where a period begins, else the chosen one.
  Turn timed_turn() const;

  bool past_caches_;
  bool measures_;
  uint32_t count_ = kFirst;
  // Ticks per byte of the last two turns through the caches, and past them. The faster one counts:
  // the kernel may interrupt any of them.
  float took_[2][2] = {{0, 0}, {0, 0}};
};

}  // namespace pycoll
