#include "sim/fabric.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace pycoll {
namespace {

void check(const FabricLevel& level) {
  const auto refuse = [&](const std::string& what) {
    throw UsageError("topology: level '" + level.name + "': " + what);
  };
  const auto pairs = static_cast<size_t>(level.size) * static_cast<size_t>(level.size);
  if (level.size < 1) refuse("expected size >= 1, got " + std::to_string(level.size));
  if (level.num_links < 1) {
    refuse("expected num_links >= 1, got " + std::to_string(level.num_links));
  }
  if (!(level.link_bytes_per_s > 0)) refuse("expected a link bandwidth above 0");
  if (!(level.latency_s >= 0)) refuse("expected a latency of at least 0");
  for (const std::vector<double>* table : {&level.pair_bytes_per_s, &level.pair_latency_s}) {
    if (!table->empty() && table->size() != pairs) {
      refuse("expected " + std::to_string(level.size) + " x " + std::to_string(level.size) +
             " numbers between its members, got " + std::to_string(table->size()));
    }
  }
  for (size_t i = 0; i < level.pair_bytes_per_s.size(); ++i) {
    const bool itself = i % static_cast<size_t>(level.size + 1) == 0;
    if (!itself && !(level.pair_bytes_per_s[i] > 0))
      refuse("expected bandwidths between members above 0");
  }
  for (double latency_s : level.pair_latency_s) {
    if (!(latency_s >= 0)) refuse("expected latencies between members of at least 0");
  }
}

}  // namespace

Fabric::Fabric(std::vector<FabricLevel> levels) : levels_(std::move(levels)) {
  if (levels_.empty()) throw UsageError("topology: expected at least one level");
  int64_t num_ranks = 1;
  members_of_.push_back(1);
  for (size_t l = 0; l < levels_.size(); ++l) {
    check(levels_[l]);
    if (levels_[l].rails && l != 1) {
      throw UsageError("topology: level '" + levels_[l].name +
                       "': expected rails at level 1 only, the level that joins hosts");
    }
    num_ranks *= levels_[l].size;
    constexpr int64_t kMostRanks = 1 << 22;
    if (num_ranks > kMostRanks) {
      throw UsageError("topology: level '" + levels_[l].name + "' makes " +
                       std::to_string(num_ranks) + " ranks; at most " + std::to_string(kMostRanks) +
                       " are possible");
    }
    members_of_.push_back(static_cast<int32_t>(num_ranks));
  }
  num_ranks_ = static_cast<int32_t>(num_ranks);
  ranks_.resize(static_cast<size_t>(num_ranks_));
  for (size_t l = 0; l < levels_.size(); ++l) {
    const FabricLevel& level = levels_[l];
    Range range;
    range.num_members = num_ranks_ / members_of_[l];
    range.first_link = num_links();
    const int64_t num_halves = 2 * range.num_members * level.num_links;
    range.first_pair = range.first_link + num_halves;
    const int64_t num_units = range.num_members / level.size;
    const auto num_pairs = static_cast<int64_t>(level.pair_bytes_per_s.size());
    constexpr int64_t kMostLinks = 1 << 26;  // half a gigabyte
    if (const int64_t found = range.first_pair + num_units * num_pairs; found > kMostLinks) {
      throw UsageError("topology: level '" + level.name + "' makes " + std::to_string(found) +
                       " links; at most " + std::to_string(kMostLinks) + " are possible");
    }
    link_bytes_per_s_.resize(static_cast<size_t>(range.first_pair), level.link_bytes_per_s);
    for (int64_t unit = 0; unit < num_units; ++unit) {
      link_bytes_per_s_.insert(link_bytes_per_s_.end(), level.pair_bytes_per_s.begin(),
                               level.pair_bytes_per_s.end());
    }
    ranges_.push_back(range);
  }
}

int32_t Fabric::lane_of(int level, int32_t rank) const {
  const auto l = static_cast<size_t>(level);
  return rank % members_of_[l] % levels_[l].num_links;
}

int32_t Fabric::link_of(int level, int32_t rank, int32_t lane, bool down) const {
  const auto l = static_cast<size_t>(level);
  const int64_t member = rank / members_of_[l];
  return static_cast<int32_t>(ranges_[l].first_link + 2 * (member * levels_[l].num_links + lane) +
                              (down ? 1 : 0));
}

int Fabric::link_level(int64_t link) const {
  size_t l = ranges_.size() - 1;
  while (l > 0 && link < ranges_[l].first_link) --l;
  return static_cast<int>(l);
}

std::string Fabric::link_name(int64_t link) const {
  const auto l = static_cast<size_t>(link_level(link));
  const FabricLevel& level = levels_[l];
  const std::string member = l == 0 ? "rank" : levels_[l - 1].name;
  if (link >= ranges_[l].first_pair) {
    const int64_t at = link - ranges_[l].first_pair;
    const int64_t size = level.size;
    const int64_t first = at / (size * size) * size;
    return member + " " + std::to_string(first + at / size % size) + " to " + member + " " +
           std::to_string(first + at % size);
  }
  const int64_t at = link - ranges_[l].first_link;
  std::string name = member + " " + std::to_string(at / 2 / level.num_links);
  if (level.num_links > 1) name += ", link " + std::to_string(at / 2 % level.num_links);
  return name + (at % 2 == 0 ? " up" : " down");
}

void Fabric::scale_links(int level, int32_t member, double factor) {
  const auto l = static_cast<size_t>(level);
  if (l >= levels_.size() || member < 0 || member >= ranges_[l].num_members || !(factor > 0)) {
    throw UsageError("topology: cannot scale the links of member " + std::to_string(member) +
                     " of level " + std::to_string(level) + " by " + std::to_string(factor));
  }
  const int64_t num_halves = 2 * levels_[l].num_links;
  const int64_t first = ranges_[l].first_link + member * num_halves;
  for (int64_t link = first; link < first + num_halves; ++link) {
    link_bytes_per_s_[static_cast<size_t>(link)] *= factor;
  }
}

int Fabric::common_level(int32_t src, int32_t dst) const {
  int level = 0;
  while (src / ranks_per_unit(level) != dst / ranks_per_unit(level)) ++level;
  return level;
}

double Fabric::latency_s(int32_t src, int32_t dst) const {
  const auto l = static_cast<size_t>(common_level(src, dst));
  const FabricLevel& level = levels_[l];
  if (level.pair_latency_s.empty()) return level.latency_s;
  const int32_t from = src / members_of_[l] % level.size;
  const int32_t to = dst / members_of_[l] % level.size;
  return level.pair_latency_s[static_cast<size_t>(from) * static_cast<size_t>(level.size) +
                              static_cast<size_t>(to)];
}

/// Appends the links of `rank`'s members up to level `top`, for one direction of a route. If
/// `lane` >= 0, it selects the link at level 1.
void Fabric::climb(int32_t rank, int32_t lane, int top, bool down,
                   std::vector<int32_t>& links) const {
  for (int level = 0; level <= top; ++level) {
    if (level < top && !levels_[static_cast<size_t>(level)].carries_outside) continue;
    const bool chosen = level == 1 && lane >= 0;
    links.push_back(link_of(level, rank, chosen ? lane : lane_of(level, rank), down));
  }
}

void Fabric::route(int32_t src, int32_t dst, std::vector<int32_t>& links) const {
  const int top = common_level(src, dst);
  int32_t lane = -1;
  if (top >= 1 && levels_[1].rails && lane_of(1, src) != lane_of(1, dst)) {
    // First goes inside the host to the rank on the destination's rail.
    lane = lane_of(1, dst);
    const int32_t host = members_of_[1];
    const int32_t neighbour = src / host * host + dst % host;
    if (!levels_[0].carries_outside) links.push_back(link_of(0, src, lane_of(0, src), false));
    links.push_back(link_of(0, neighbour, lane_of(0, neighbour), true));
  }
  climb(src, lane, top, false, links);
  const auto l = static_cast<size_t>(top);
  const FabricLevel& level = levels_[l];
  if (!level.pair_bytes_per_s.empty()) {
    const int64_t unit = src / ranks_per_unit(top);
    const int64_t from = src / members_of_[l] % level.size;
    const int64_t to = dst / members_of_[l] % level.size;
    links.push_back(
        static_cast<int32_t>(ranges_[l].first_pair + (unit * level.size + from) * level.size + to));
  }
  climb(dst, -1, top, true, links);
}

}  // namespace pycoll
