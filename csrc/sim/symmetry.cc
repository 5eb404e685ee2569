#include "sim/symmetry.h"

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sim/jitter.h"

namespace pycoll {
namespace {

using Colours = std::vector<uint64_t>;

constexpr int kMostRounds = 1200;

uint64_t mix(uint64_t x) { return Jitter::mix(x); }
uint64_t join(uint64_t a, uint64_t b) { return mix(a ^ mix(b)); }
uint64_t join(uint64_t a, double b) { return join(a, std::bit_cast<uint64_t>(b)); }

size_t num_distinct(Colours colours) {
  std::sort(colours.begin(), colours.end());
  return static_cast<size_t>(std::unique(colours.begin(), colours.end()) - colours.begin());
}

/// A partition into classes, numbered by their first member, which represents them.
struct Classes {
  std::vector<int32_t> of;
  std::vector<int32_t> first;
  std::vector<int32_t> size;

  explicit Classes(const Colours& colours) {
    std::unordered_map<uint64_t, int32_t> seen;
    for (size_t i = 0; i < colours.size(); ++i) {
      const auto [at, is_new] = seen.try_emplace(colours[i], static_cast<int32_t>(first.size()));
      if (is_new) {
        first.push_back(static_cast<int32_t>(i));
        size.push_back(0);
      }
      ++size[static_cast<size_t>(at->second)];
      of.push_back(at->second);
    }
  }
};

class Refinement {
 public:
  explicit Refinement(const FlowSystem& full) : full_(full) {
    actors_.resize(full.actors.size());
    channels_.resize(full.channels.size());
    links_.resize(full.link_bytes_per_s.size());
    place_at_src_.resize(full.channels.size(), -1);
    place_at_dst_.resize(full.channels.size(), -1);
    for (size_t a = 0; a < actors_.size(); ++a) {
      actors_[a] = colour_of(full.actors[a]);
      int32_t place = 0;
      for_each_channel(full.actors[a], [&](int32_t channel) {
        const auto c = static_cast<size_t>(channel);
        std::vector<int32_t>& places =
            full.channels[c].src == static_cast<int32_t>(a) ? place_at_src_ : place_at_dst_;
        if (places[c] < 0) places[c] = place;
        ++place;
      });
    }
    for (size_t c = 0; c < channels_.size(); ++c) {
      const FlowChannel& channel = full.channels[c];
      channels_[c] = join(join(mix(1), channel.latency_s), channel.solo_bytes_per_s);
      for (uint8_t crossed : channel.crossed) channels_[c] = join(channels_[c], uint64_t{crossed});
    }
    for (size_t l = 0; l < links_.size(); ++l) links_[l] = join(mix(2), full.link_bytes_per_s[l]);
  }

  /// Refines until the classes are stable. False when too little would be saved.
  bool refine() {
    size_t num_classes = 0;
    for (int round = 0; round < kMostRounds; ++round) {
      step();
      const size_t num_actors = num_distinct(actors_);
      if (2 * num_actors > actors_.size()) return false;
      const size_t now = num_actors + num_distinct(channels_) + num_distinct(links_);
      if (now == num_classes) return true;
      num_classes = now;
    }
    return false;
  }

  std::optional<FlowSystem> quotient() const {
    const Classes actors(actors_), channels(channels_), links(links_);
    if (!is_equitable(actors, channels, links)) return std::nullopt;
    FlowSystem system;
    for (size_t k = 0; k < actors.first.size(); ++k) {
      FlowActor actor = full_.actors[static_cast<size_t>(actors.first[k])];
      const auto first_loop = static_cast<int32_t>(system.loops.size());
      for (ScriptLoop loop : full_.loops_of(actor)) {
        const int32_t first_step = loop.first_step;
        loop.first_step = static_cast<int32_t>(system.steps.size());
        system.loops.push_back(loop);
        for (int32_t s = first_step; s < first_step + loop.num_steps; ++s) {
          FlowStep step = full_.steps[static_cast<size_t>(s)];
          const int32_t from = step.first_channel;
          step.first_channel = static_cast<int32_t>(system.step_channels.size());
          for (int32_t i = 0; i < step.num_srcs + step.num_dsts; ++i) {
            system.step_channels.push_back(
                channels
                    .of[static_cast<size_t>(full_.step_channels[static_cast<size_t>(from + i)])]);
          }
          system.steps.push_back(step);
        }
      }
      actor.first_loop = first_loop;
      actor.num_ranks = actors.size[k];
      system.actors.push_back(actor);
    }
    for (int32_t link : links.first) {
      system.link_bytes_per_s.push_back(full_.link_bytes_per_s[static_cast<size_t>(link)]);
    }
    const auto weights = crossings(links, channels);
    for (int32_t first : channels.first) {
      FlowChannel channel = full_.channels[static_cast<size_t>(first)];
      const std::span<const FlowHop> hops = full_.hops_of(channel);
      channel.src = actors.of[static_cast<size_t>(channel.src)];
      channel.dst = actors.of[static_cast<size_t>(channel.dst)];
      channel.first_hop = static_cast<int32_t>(system.hops.size());
      const int32_t own = channels.of[static_cast<size_t>(first)];
      std::vector<int32_t> seen;
      for (const FlowHop& hop : hops) {
        const int32_t link = links.of[static_cast<size_t>(hop.link)];
        if (std::find(seen.begin(), seen.end(), link) != seen.end()) continue;
        seen.push_back(link);
        const std::vector<int32_t>& crossing =
            weights[static_cast<size_t>(links.first[static_cast<size_t>(link)])];
        system.hops.push_back(
            {link, static_cast<double>(std::count(crossing.begin(), crossing.end(), own))});
      }
      channel.num_hops = static_cast<int32_t>(system.hops.size()) - channel.first_hop;
      system.channels.push_back(channel);
    }
    system.actor_of_rank = actors.of;
    return system;
  }

 private:
  template <typename Visit>
  void for_each_step(const FlowActor& actor, Visit visit) const {
    for (const ScriptLoop& loop : full_.loops_of(actor)) {
      for (int32_t s = loop.first_step; s < loop.first_step + loop.num_steps; ++s) {
        visit(full_.steps[static_cast<size_t>(s)]);
      }
    }
  }
  template <typename Visit>
  void for_each_channel(const FlowActor& actor, Visit visit) const {
    for_each_step(actor, [&](const FlowStep& step) {
      for (int32_t i = 0; i < step.num_srcs + step.num_dsts; ++i) {
        visit(full_.step_channels[static_cast<size_t>(step.first_channel + i)]);
      }
    });
  }

  uint64_t colour_of(const FlowActor& actor) const {
    uint64_t colour = join(join(mix(3), actor.cost.overhead_s), actor.cost.gamma_s_per_byte);
    colour = join(colour, actor.cost.start_s);
    for (const ScriptLoop& loop : full_.loops_of(actor)) {
      colour = join(colour, static_cast<uint64_t>(loop.count));
      colour = join(colour, static_cast<uint64_t>(loop.num_steps));
    }
    for_each_step(actor, [&](const FlowStep& step) {
      colour = join(colour, static_cast<uint64_t>(step.num_srcs));
      colour = join(colour, static_cast<uint64_t>(step.num_dsts));
      colour = join(colour, static_cast<uint64_t>(step.num_combined));
      colour = join(colour, step.fraction);
    });
    return colour;
  }

  void step() {
    Colours crossing(links_.size());
    for (size_t c = 0; c < channels_.size(); ++c) {
      const FlowChannel& channel = full_.channels[c];
      uint64_t colour = channels_[c];
      colour = join(colour, actors_[static_cast<size_t>(channel.src)]);
      colour = join(colour, static_cast<uint64_t>(place_at_src_[c]));
      colour = join(colour, actors_[static_cast<size_t>(channel.dst)]);
      colour = join(colour, static_cast<uint64_t>(place_at_dst_[c]));
      for (const FlowHop& hop : full_.hops_of(channel)) {
        colour = join(colour, links_[static_cast<size_t>(hop.link)]);
      }
      channels_[c] = colour;
      uint64_t place = 0;
      for (const FlowHop& hop : full_.hops_of(channel)) {
        crossing[static_cast<size_t>(hop.link)] += join(colour, ++place);  // in any order
      }
    }
    for (size_t l = 0; l < links_.size(); ++l) links_[l] = join(links_[l], crossing[l]);
    for (size_t a = 0; a < actors_.size(); ++a) {
      uint64_t colour = actors_[a];
      for_each_channel(full_.actors[a], [&](int32_t channel) {
        colour = join(colour, channels_[static_cast<size_t>(channel)]);
      });
      actors_[a] = colour;
    }
  }

  /// The classes of the channels that cross each link, in ascending order.
  std::vector<std::vector<int32_t>> crossings(const Classes& links, const Classes& channels) const {
    std::vector<std::vector<int32_t>> found(links.of.size());
    for (size_t c = 0; c < full_.channels.size(); ++c) {
      for (const FlowHop& hop : full_.hops_of(full_.channels[c])) {
        found[static_cast<size_t>(hop.link)].push_back(channels.of[c]);
      }
    }
    for (std::vector<int32_t>& of_link : found) std::sort(of_link.begin(), of_link.end());
    return found;
  }

  /// Whether the classes are equitable. Checks them exactly, since colours are hashes.
  bool is_equitable(const Classes& actors, const Classes& channels, const Classes& links) const {
    const auto classes_of = [&](const FlowActor& actor) {
      std::vector<int32_t> classes;
      for_each_channel(actor, [&](int32_t channel) {
        classes.push_back(channels.of[static_cast<size_t>(channel)]);
      });
      return classes;
    };
    std::vector<std::vector<int32_t>> expected;
    for (int32_t first : actors.first) {
      expected.push_back(classes_of(full_.actors[static_cast<size_t>(first)]));
    }
    for (size_t a = 0; a < actors.of.size(); ++a) {
      const auto k = static_cast<size_t>(actors.of[a]);
      const FlowActor& first = full_.actors[static_cast<size_t>(actors.first[k])];
      if (colour_of(full_.actors[a]) != colour_of(first)) return false;
      if (classes_of(full_.actors[a]) != expected[k]) return false;
    }
    for (size_t c = 0; c < channels.of.size(); ++c) {
      const auto first = static_cast<size_t>(channels.first[static_cast<size_t>(channels.of[c])]);
      const FlowChannel &a = full_.channels[c], &b = full_.channels[first];
      const auto same = [&](int32_t x, int32_t y) {
        return actors.of[static_cast<size_t>(x)] == actors.of[static_cast<size_t>(y)];
      };
      if (!same(a.src, b.src) || !same(a.dst, b.dst) || a.latency_s != b.latency_s ||
          a.solo_bytes_per_s != b.solo_bytes_per_s || a.num_hops != b.num_hops ||
          a.crossed != b.crossed || place_at_src_[c] != place_at_src_[first] ||
          place_at_dst_[c] != place_at_dst_[first]) {
        return false;
      }
      for (int32_t i = 0; i < a.num_hops; ++i) {
        const auto link = [&](const FlowChannel& channel) {
          return links
              .of[static_cast<size_t>(full_.hops[static_cast<size_t>(channel.first_hop + i)].link)];
        };
        if (link(a) != link(b)) return false;
      }
    }
    const auto found = crossings(links, channels);
    for (size_t l = 0; l < links.of.size(); ++l) {
      const auto first = static_cast<size_t>(links.first[static_cast<size_t>(links.of[l])]);
      if (full_.link_bytes_per_s[l] != full_.link_bytes_per_s[first]) return false;
      if (found[l] != found[first]) return false;
    }
    return true;
  }

  const FlowSystem& full_;
  Colours actors_;
  Colours channels_;
  Colours links_;
  std::vector<int32_t> place_at_src_;  // index of a channel among those of its source's script
  std::vector<int32_t> place_at_dst_;
};

}  // namespace

std::optional<FlowSystem> compress(const FlowSystem& full) {
  Refinement refinement(full);
  if (!refinement.refine()) return std::nullopt;
  return refinement.quotient();
}

}  // namespace pycoll
