#include "base/peer_stores.h"

#include <algorithm>

#include "base/environment.h"
#include "base/ticks.h"

namespace pycoll {
namespace {

uint64_t now_ticks() {
  static const bool steady_counter = has_steady_counter();
  return read_ticks(steady_counter);
}

/// The less of two times, of which the second may not have been measured yet.
float least(const float (&took)[2]) { return took[1] == 0 ? took[0] : std::min(took[0], took[1]); }

}  // namespace

PeerStores::Way PeerStores::default_way() {
  const auto asked = env_text("PYCOLL_PEER_STORES");
  if (!asked || *asked == "measured") return Way::kMeasured;
  return *asked == "cached" ? Way::kCached : Way::kPastCaches;
}

/// The number of the block that begins the next period.
uint32_t PeerStores::next_period() const {
  const uint32_t period = past_caches_ ? kPeriod : kCachedPeriod;
  return (count_ / period + 1) * period;
}

/// The turn of a block that is timed, or that begins a period.
PeerStores::Turn PeerStores::special_turn(const void* dst) {
  using Trial = Turn::Trial;
  if (trial_ != nullptr) {
    next_special_ = count_ + kTrialPeriod;
    const bool ends = dst == trial_ || count_ - trial_began_ >= max_trial();
    return {false, true, now_ticks(), ends ? Trial::kEnds : Trial::kGoesOn};
  }
  // The first two blocks of a period are timed.
  const bool tries_other = count_ % kPeriod == 0 || asked_;
  asked_ = false;
  next_special_ = tries_other || count_ % kCachedPeriod == 0 ? count_ + 1 : next_period();
  if (!past_caches_ || !tries_other) return {past_caches_ || tries_other, true, now_ticks()};
  if (pause_left_ != 0) {
    --pause_left_;
    return {true};
  }
  return {false, true, now_ticks(), Trial::kBegins, dst};
}

void PeerStores::took(const Turn& turn, size_t nbytes) { took(turn, nbytes, now_ticks()); }

void PeerStores::took(const Turn& turn, size_t nbytes, uint64_t end) {
  const float ticks_per_byte = static_cast<float>(end - turn.start) / static_cast<float>(nbytes);
  if (turn.trial != Turn::Trial::kNone) return took_in_trial(turn, ticks_per_byte);
  float (&of_way)[2] = took_[turn.past_caches ? 1 : 0];
  of_way[1] = of_way[0];
  of_way[0] = ticks_per_byte;
  const float cached = least(took_[0]);
  const float past = least(took_[1]);
  if (cached == 0 || past == 0) return;
  const bool is_slow = past * kMargin < cached;
  if (!turn.past_caches) num_slow_ = is_slow ? num_slow_ + 1 : 0;
  past_caches_ =
      is_slow && (past_caches_ || num_slow_ >= slow_turns() || past * kFarMargin < cached);
}

/// A trial goes on until its first block is written again, unless the caches are hopeless.
void PeerStores::took_in_trial(const Turn& turn, float ticks_per_byte) {
  const float past = least(took_[1]);
  if (turn.trial != Turn::Trial::kEnds && ticks_per_byte < kFarMargin * past) {
    if (turn.trial == Turn::Trial::kGoesOn) return;
    trial_ = turn.dst;
    trial_began_ = count_;
    next_special_ = count_ + kTrialPeriod;
    return;
  }
  trial_ = nullptr;
  past_caches_ = past * kMargin < ticks_per_byte;
  pause_ = past_caches_ ? std::clamp(2 * pause_, 1U, kMaxPause) : 0;
  pause_left_ = pause_;
  num_slow_ = 0;
  took_[0][0] = took_[0][1] = ticks_per_byte;
  next_special_ = next_period();
}

}  // namespace pycoll
