#include "sim/flow_system.h"

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>

#include "base/error.h"

namespace pycoll {
namespace {

class Builder {
 public:
  Builder(const std::vector<Script>& scripts, const Fabric& fabric)
      : scripts_(scripts), fabric_(fabric) {
    if (scripts.size() != static_cast<size_t>(fabric.num_ranks())) {
      throw UsageError("simulate: the topology has " + std::to_string(fabric.num_ranks()) +
                       " ranks, the schedule " + std::to_string(scripts.size()));
    }
    if (fabric.levels().size() > kMaxLevels) {
      throw UsageError("topology: at most " + std::to_string(kMaxLevels) +
                       " levels are possible, got " + std::to_string(fabric.levels().size()));
    }
  }

  FlowSystem build(std::vector<LevelLoad>* loads) {
    for (size_t rank = 0; rank < scripts_.size(); ++rank) add_channels(static_cast<int32_t>(rank));
    for (size_t rank = 0; rank < scripts_.size(); ++rank) add_actor(static_cast<int32_t>(rank));
    drop_unlimiting_hops();
    if (loads != nullptr) *loads = sum_loads();
    return std::move(system_);
  }

 private:
  static uint64_t key(int32_t src, int32_t dst) {
    return static_cast<uint64_t>(src) << 32 | static_cast<uint32_t>(dst);
  }

  /// Adds the channels of one sender next to each other.
  void add_channels(int32_t src) {
    for (const Script& script = scripts_[static_cast<size_t>(src)];
         const ScriptStep& step : script.steps) {
      for (int32_t dst : script.dsts(step)) {
        const auto next = static_cast<int32_t>(system_.channels.size());
        if (!channel_of_.try_emplace(key(src, dst), next).second) continue;
        FlowChannel channel;
        channel.src = src;
        channel.dst = dst;
        channel.latency_s = fabric_.latency_s(src, dst);
        route_.clear();
        fabric_.route(src, dst, route_);
        channel.first_hop = static_cast<int32_t>(system_.hops.size());
        channel.num_hops = static_cast<int32_t>(route_.size());
        channel.solo_bytes_per_s = std::numeric_limits<double>::infinity();
        for (int32_t link : route_) {
          system_.hops.push_back({link, 1});
          channel.solo_bytes_per_s =
              std::min(channel.solo_bytes_per_s, fabric_.link_bytes_per_s(link));
          ++channel.crossed[static_cast<size_t>(fabric_.link_level(link))];
        }
        system_.channels.push_back(channel);
        fractions_.push_back(0);
      }
    }
  }

  void add_actor(int32_t rank) {
    const Script& script = scripts_[static_cast<size_t>(rank)];
    FlowActor actor;
    actor.first_loop = static_cast<int32_t>(system_.loops.size());
    actor.num_loops = static_cast<int32_t>(script.loops.size());
    actor.cost = fabric_.ranks()[static_cast<size_t>(rank)];
    const auto first_step = static_cast<int32_t>(system_.steps.size());
    for (const ScriptStep& step : script.steps) {
      system_.steps.push_back({static_cast<int32_t>(system_.step_channels.size()), step.num_srcs,
                               step.num_dsts, step.num_combined, step.fraction});
      for (int32_t src : script.srcs(step)) system_.step_channels.push_back(find(src, rank));
      for (int32_t dst : script.dsts(step)) system_.step_channels.push_back(find(rank, dst));
    }
    for (ScriptLoop loop : script.loops) {
      loop.first_step += first_step;
      system_.loops.push_back(loop);
      for (int32_t s = loop.first_step; s < loop.first_step + loop.num_steps; ++s) {
        const FlowStep& step = system_.steps[static_cast<size_t>(s)];
        for (int32_t channel : system_.dsts(step)) {
          fractions_[static_cast<size_t>(channel)] +=
              static_cast<double>(loop.count) * step.fraction;
        }
      }
    }
    system_.actors.push_back(actor);
    system_.actor_of_rank.push_back(rank);
  }

  int32_t find(int32_t src, int32_t dst) const {
    const auto at = channel_of_.find(key(src, dst));
    if (at == channel_of_.end()) {
      throw UsageError("simulate: rank " + std::to_string(dst) + " waits for rank " +
                       std::to_string(src) + ", which never sends to it");
    }
    return at->second;
  }

  /// Drops links that cannot limit a rate. A sender makes one transfer at a time, so a link that
  /// can carry the fastest transfer of each of its senders at once slows none of them down.
  void drop_unlimiting_hops() {
    struct Most {
      int32_t src = -1;
      double of_src = 0;
      double of_all = 0;
    };
    std::vector<Most> most(static_cast<size_t>(fabric_.num_links()));
    all_hops_ = system_.hops;
    for (const FlowChannel& channel : system_.channels) {
      for (const FlowHop& hop : system_.hops_of(channel)) {
        Most& at = most[static_cast<size_t>(hop.link)];
        if (at.src != channel.src) at.of_src = 0;
        at.src = channel.src;
        at.of_all += std::max(0.0, channel.solo_bytes_per_s - at.of_src);
        at.of_src = std::max(at.of_src, channel.solo_bytes_per_s);
      }
    }
    constexpr double kRounding = 1 + 1e-12;
    std::vector<int32_t> kept_as(most.size(), -1);
    system_.hops.clear();
    for (FlowChannel& channel : system_.channels) {
      const int32_t first = channel.first_hop;
      channel.first_hop = static_cast<int32_t>(system_.hops.size());
      for (int32_t i = first; i < first + channel.num_hops; ++i) {
        const int32_t link = all_hops_[static_cast<size_t>(i)].link;
        const double bytes_per_s = fabric_.link_bytes_per_s(link);
        if (most[static_cast<size_t>(link)].of_all <= bytes_per_s * kRounding) continue;
        int32_t& kept = kept_as[static_cast<size_t>(link)];
        if (kept < 0) {
          kept = static_cast<int32_t>(system_.link_bytes_per_s.size());
          system_.link_bytes_per_s.push_back(bytes_per_s);
        }
        system_.hops.push_back({kept, 1});
      }
      routes_.push_back({first, channel.num_hops});
      channel.num_hops = static_cast<int32_t>(system_.hops.size()) - channel.first_hop;
    }
  }

  std::vector<LevelLoad> sum_loads() const {
    std::vector<double> carried(static_cast<size_t>(fabric_.num_links()));
    for (size_t c = 0; c < routes_.size(); ++c) {
      for (int32_t i = 0; i < routes_[c].count; ++i) {
        const int32_t link = all_hops_[static_cast<size_t>(routes_[c].first + i)].link;
        carried[static_cast<size_t>(link)] += fractions_[c];
      }
    }
    std::vector<LevelLoad> loads(fabric_.levels().size());
    for (int64_t link = 0; link < fabric_.num_links(); ++link) {
      const double fraction = carried[static_cast<size_t>(link)];
      if (fraction == 0) continue;
      const double bytes_per_s = fabric_.link_bytes_per_s(link);
      LevelLoad& load = loads[static_cast<size_t>(fabric_.link_level(link))];
      ++load.num_links;
      load.bytes_per_s += bytes_per_s;
      load.fraction += fraction;
      if (load.busiest_link >= 0 &&
          fraction / bytes_per_s <= load.busiest_fraction / load.busiest_bytes_per_s) {
        continue;
      }
      load.busiest_link = link;
      load.busiest_fraction = fraction;
      load.busiest_bytes_per_s = bytes_per_s;
    }
    return loads;
  }

  const std::vector<Script>& scripts_;
  const Fabric& fabric_;
  FlowSystem system_;
  std::unordered_map<uint64_t, int32_t> channel_of_;
  std::vector<double> fractions_;  // total part of the message, by channel
  std::vector<int32_t> route_;
  std::vector<FlowHop> all_hops_;
  std::vector<ChunkRange> routes_;  // of each channel in all_hops_
};

}  // namespace

int64_t FlowSystem::num_messages() const {
  int64_t sum = 0;
  for (const FlowActor& actor : actors) {
    for (const ScriptLoop& loop : loops_of(actor)) {
      int64_t in_body = 0;
      for (int32_t s = loop.first_step; s < loop.first_step + loop.num_steps; ++s) {
        in_body += steps[static_cast<size_t>(s)].num_dsts;
      }
      sum += loop.count * in_body;
    }
  }
  return sum;
}

FlowSystem make_flow_system(const std::vector<Script>& scripts, const Fabric& fabric,
                            std::vector<LevelLoad>* loads) {
  return Builder(scripts, fabric).build(loads);
}

}  // namespace pycoll
