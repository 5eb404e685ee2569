// The input of the flow simulator: actors that follow scripts, channels between them, and the links
// that channels share. It is made from the scripts of all ranks and a fabric, with an actor for
// each rank. symmetry.h makes a smaller one, with an actor for each class of ranks that behave
// equally.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "schedule/script.h"
#include "sim/fabric.h"

namespace pycoll {

inline constexpr int kMaxLevels = 8;

struct FlowActor {
  int32_t first_loop = 0;
  int32_t num_loops = 0;
  int32_t num_ranks = 1;  // number of ranks that the actor represents
  RankCost cost;
};

struct FlowStep {
  int32_t first_channel = 0;  // in FlowSystem::step_channels: the sources', then the destinations'
  int32_t num_srcs = 0;
  int32_t num_dsts = 0;
  int32_t num_combined = 0;
  double fraction = 0;
};

/// A link of slots from one rank to another, over links of the fabric.
struct FlowChannel {
  int32_t src = 0;  // actors
  int32_t dst = 0;
  int32_t first_hop = 0;  // in FlowSystem::hops: the links that other messages may share
  int32_t num_hops = 0;
  double latency_s = 0;
  double solo_bytes_per_s = 0;                // when no other message is in flight
  std::array<uint8_t, kMaxLevels> crossed{};  // number of links of each level, for reports
};

/// A link that a channel crosses; `weight` channels of its class cross the same link.
struct FlowHop {
  int32_t link = 0;
  double weight = 1;
};

struct FlowSystem {
  std::vector<FlowActor> actors;
  std::vector<ScriptLoop> loops;  // first_step is an index into `steps`
  std::vector<FlowStep> steps;
  std::vector<int32_t> step_channels;
  std::vector<FlowChannel> channels;
  std::vector<FlowHop> hops;
  std::vector<double> link_bytes_per_s;  // of the links in `hops`
  std::vector<int32_t> actor_of_rank;

  std::span<const ScriptLoop> loops_of(const FlowActor& actor) const {
    return {loops.data() + actor.first_loop, static_cast<size_t>(actor.num_loops)};
  }
  std::span<const int32_t> srcs(const FlowStep& step) const {
    return {step_channels.data() + step.first_channel, static_cast<size_t>(step.num_srcs)};
  }
  std::span<const int32_t> dsts(const FlowStep& step) const {
    return {step_channels.data() + step.first_channel + step.num_srcs,
            static_cast<size_t>(step.num_dsts)};
  }
  std::span<const FlowHop> hops_of(const FlowChannel& channel) const {
    return {hops.data() + channel.first_hop, static_cast<size_t>(channel.num_hops)};
  }
  /// Number of messages of all actors when every script runs once.
  int64_t num_messages() const;
};

/// Load of a level's links when every script runs once.
struct LevelLoad {
  int64_t num_links = 0;        // links with any load
  double bytes_per_s = 0;       // of these together
  double fraction = 0;          // parts of the message, summed over these links
  double busiest_fraction = 0;  // on the link that takes longest for its load
  double busiest_bytes_per_s = 0;
  int64_t busiest_link = -1;
};

/// `scripts` by rank. `loads`, if given, gets one row per level.
/// Raises UsageError when a rank waits for a message that no rank sends.
FlowSystem make_flow_system(const std::vector<Script>& scripts, const Fabric& fabric,
                            std::vector<LevelLoad>* loads = nullptr);

}  // namespace pycoll
