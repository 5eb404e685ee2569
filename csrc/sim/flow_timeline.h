// Bytes over time, in bins whose width doubles whenever the end lies beyond the last bin.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "sim/flow_simulation.h"
#include "sim/flow_system.h"

namespace pycoll {

class TimelineRecorder {
 public:
  TimelineRecorder(const FlowSystem& system, int num_bins)
      : system_(system), num_bins_(static_cast<size_t>(num_bins)) {
    timeline_.bin_s = 1e-9;
    timeline_.level_nbytes.assign(kMaxLevels, std::vector<double>(num_bins_));
  }

  void add(int32_t channel_idx, double from_s, double to_s, double nbytes) {
    const FlowChannel& channel = system_.channels[static_cast<size_t>(channel_idx)];
    while (to_s >= timeline_.bin_s * static_cast<double>(num_bins_)) halve();
    const double num_ranks = system_.actors[static_cast<size_t>(channel.src)].num_ranks;
    const auto first = static_cast<size_t>(from_s / timeline_.bin_s);
    const auto last = std::min(static_cast<size_t>(to_s / timeline_.bin_s), num_bins_ - 1);
    for (size_t level = 0; level < kMaxLevels; ++level) {
      if (channel.crossed[level] == 0) continue;
      const double carried = nbytes * num_ranks * channel.crossed[level];
      std::vector<double>& bins = timeline_.level_nbytes[level];
      if (first >= last) {
        bins[last] += carried;
        continue;
      }
      const double per_s = carried / (to_s - from_s);
      for (size_t bin = first; bin <= last; ++bin) {
        const double begin_s = std::max(from_s, timeline_.bin_s * static_cast<double>(bin));
        const double end_s = std::min(to_s, timeline_.bin_s * static_cast<double>(bin + 1));
        bins[bin] += per_s * std::max(0.0, end_s - begin_s);
      }
    }
  }

  FlowTimeline take() { return std::move(timeline_); }

 private:
  void halve() {
    timeline_.bin_s *= 2;
    for (std::vector<double>& bins : timeline_.level_nbytes) {
      for (size_t bin = 0; bin < num_bins_; ++bin) {
        const size_t at = 2 * bin;
        const double first = at < num_bins_ ? bins[at] : 0;
        bins[bin] = first + (at + 1 < num_bins_ ? bins[at + 1] : 0);
      }
    }
  }

  const FlowSystem& system_;
  const size_t num_bins_;
  FlowTimeline timeline_;
};

}  // namespace pycoll
