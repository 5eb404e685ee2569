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

PeerStores::Turn PeerStores::timed_turn() const {
  return {past_caches_ != (count_ % kPeriod == 0), true, now_ticks()};
}

void PeerStores::took(const Turn& turn, size_t nbytes) { took(turn, nbytes, now_ticks()); }

void PeerStores::took(const Turn& turn, size_t nbytes, uint64_t end) {
  float (&of_way)[2] = took_[turn.past_caches ? 1 : 0];
  of_way[1] = of_way[0];
  of_way[0] = static_cast<float>(end - turn.start) / static_cast<float>(nbytes);
  const float cached = least(took_[0]);
  const float past = least(took_[1]);
  if (cached != 0 && past != 0) past_caches_ = past * kMargin < cached;
}

}  // namespace pycoll
