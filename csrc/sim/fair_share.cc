#include "sim/fair_share.h"

#include <algorithm>
#include <cmath>

namespace pycoll {
namespace {

constexpr double kSameRate = 1e-12;  // largest relative difference that rounding causes

}  // namespace

FairShare::FairShare(const FlowSystem& system, Moved moved)
    : system_(system), moved_(std::move(moved)) {
  const size_t num_channels = system.channels.size();
  left_.resize(num_channels);
  rate_.resize(num_channels);
  since_s_.resize(num_channels);
  changed_.resize(num_channels);
  frozen_.resize(num_channels);
  seen_flow_.resize(num_channels);
  const size_t num_links = system.link_bytes_per_s.size();
  active_.resize(num_links);
  is_dirty_.resize(num_links);
  seen_link_.resize(num_links);
  room_.resize(num_links);
  weight_.resize(num_links);
  place_.resize(system.hops.size());
  channel_of_hop_.resize(system.hops.size());
  for (size_t c = 0; c < num_channels; ++c) {
    const FlowChannel& channel = system.channels[c];
    for (int32_t h = channel.first_hop; h < channel.first_hop + channel.num_hops; ++h) {
      channel_of_hop_[static_cast<size_t>(h)] = static_cast<int32_t>(c);
    }
  }
}

void FairShare::mark(int32_t link) {
  const auto l = static_cast<size_t>(link);
  if (is_dirty_[l]) return;
  is_dirty_[l] = true;
  dirty_.push_back(link);
}

void FairShare::start(int32_t channel, double now_s, double nbytes) {
  const auto c = static_cast<size_t>(channel);
  left_[c] = nbytes;
  rate_[c] = 0;
  since_s_[c] = now_s;
  changed_[c] = true;
  const FlowChannel& at = system_.channels[c];
  for (int32_t h = at.first_hop; h < at.first_hop + at.num_hops; ++h) {
    const int32_t link = system_.hops[static_cast<size_t>(h)].link;
    std::vector<int32_t>& active = active_[static_cast<size_t>(link)];
    place_[static_cast<size_t>(h)] = static_cast<int32_t>(active.size());
    active.push_back(h);
    mark(link);
  }
}

void FairShare::finish(int32_t channel, double now_s) {
  const auto c = static_cast<size_t>(channel);
  settle(channel, now_s);
  const FlowChannel& at = system_.channels[c];
  for (int32_t h = at.first_hop; h < at.first_hop + at.num_hops; ++h) {
    const int32_t link = system_.hops[static_cast<size_t>(h)].link;
    std::vector<int32_t>& active = active_[static_cast<size_t>(link)];
    const int32_t place = place_[static_cast<size_t>(h)];
    active[static_cast<size_t>(place)] = active.back();
    place_[static_cast<size_t>(active.back())] = place;
    active.pop_back();
    if (!active.empty()) mark(link);
  }
}

void FairShare::settle(int32_t channel, double now_s) {
  const auto c = static_cast<size_t>(channel);
  const double nbytes = std::min(left_[c], rate_[c] * (now_s - since_s_[c]));
  if (moved_ && nbytes > 0) moved_(channel, since_s_[c], now_s, nbytes);
  left_[c] -= nbytes;
  since_s_[c] = now_s;
}

/// Finds all messages connected to `link` by a chain of shared links.
void FairShare::find_component(int32_t link) {
  links_.assign(1, link);
  flows_.clear();
  seen_link_[static_cast<size_t>(link)] = stamp_;
  for (size_t i = 0; i < links_.size(); ++i) {
    for (int32_t hop : active_[static_cast<size_t>(links_[i])]) {
      const int32_t channel = channel_of_hop_[static_cast<size_t>(hop)];
      if (seen_flow_[static_cast<size_t>(channel)] == stamp_) continue;
      seen_flow_[static_cast<size_t>(channel)] = stamp_;
      flows_.push_back(channel);
      for (const FlowHop& other : system_.hops_of(system_.channels[static_cast<size_t>(channel)])) {
        if (seen_link_[static_cast<size_t>(other.link)] == stamp_) continue;
        seen_link_[static_cast<size_t>(other.link)] = stamp_;
        links_.push_back(other.link);
      }
    }
  }
}

/// Progressive filling: all rates grow equally; a rate stops when its link is full, or when it
/// reaches the rate that the message has alone. A link's share only grows as rates stop, so old
/// shares in the heap are lower bounds.
void FairShare::share(double now_s) {
  before_.clear();
  for (int32_t channel : flows_) {
    settle(channel, now_s);
    before_.push_back(rate_[static_cast<size_t>(channel)]);
    frozen_[static_cast<size_t>(channel)] = false;
  }
  if (flows_.size() == 1) {  // the most frequent case
    const auto c = static_cast<size_t>(flows_[0]);
    double rate = system_.channels[c].solo_bytes_per_s;
    for (const FlowHop& hop : system_.hops_of(system_.channels[c])) {
      rate = std::min(rate, system_.link_bytes_per_s[static_cast<size_t>(hop.link)] / hop.weight);
    }
    if (std::abs(rate - rate_[c]) > kSameRate * rate) changed_[c] = true;
    rate_[c] = rate;
    return;
  }
  const auto later = std::greater<std::pair<double, int32_t>>();
  heap_.clear();
  for (int32_t link : links_) {
    const auto l = static_cast<size_t>(link);
    room_[l] = system_.link_bytes_per_s[l];
    weight_[l] = 0;
    for (int32_t hop : active_[l]) weight_[l] += system_.hops[static_cast<size_t>(hop)].weight;
    if (weight_[l] > 0) heap_.push_back({room_[l] / weight_[l], link});
  }
  std::make_heap(heap_.begin(), heap_.end(), later);
  const auto freeze = [&](int32_t channel, double rate) {
    const auto c = static_cast<size_t>(channel);
    frozen_[c] = true;
    rate_[c] = rate;
    for (const FlowHop& hop : system_.hops_of(system_.channels[c])) {
      const auto l = static_cast<size_t>(hop.link);
      room_[l] = std::max(0.0, room_[l] - hop.weight * rate);
      weight_[l] -= hop.weight;
    }
  };
  const auto solo = [&](int32_t channel) {
    return system_.channels[static_cast<size_t>(channel)].solo_bytes_per_s;
  };
  std::vector<int32_t> by_solo = flows_;
  std::sort(by_solo.begin(), by_solo.end(),
            [&](int32_t a, int32_t b) { return solo(a) < solo(b); });
  size_t next = 0;
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    auto [old_share, link] = heap_.back();
    heap_.pop_back();
    const auto l = static_cast<size_t>(link);
    constexpr double kNothing = 1e-9;  // for a weight, which is a count
    if (weight_[l] < kNothing) continue;
    const double share = room_[l] / weight_[l];
    if (share > old_share * (1 + 1e-12)) {
      heap_.push_back({share, link});
      std::push_heap(heap_.begin(), heap_.end(), later);
      continue;
    }
    bool any = false;
    while (next < by_solo.size() && solo(by_solo[next]) <= share) {
      if (!frozen_[static_cast<size_t>(by_solo[next])]) {
        freeze(by_solo[next], solo(by_solo[next]));
        any = true;
      }
      ++next;
    }
    if (any) {  // the link may have more bandwidth left now
      if (weight_[l] >= kNothing) {
        heap_.push_back({room_[l] / weight_[l], link});
        std::push_heap(heap_.begin(), heap_.end(), later);
      }
      continue;
    }
    for (int32_t hop : active_[l]) {
      const int32_t channel = channel_of_hop_[static_cast<size_t>(hop)];
      if (!frozen_[static_cast<size_t>(channel)]) freeze(channel, share);
    }
  }
  for (size_t i = 0; i < flows_.size(); ++i) {
    const auto c = static_cast<size_t>(flows_[i]);
    if (std::abs(rate_[c] - before_[i]) > kSameRate * rate_[c]) changed_[c] = true;
  }
}

}  // namespace pycoll
