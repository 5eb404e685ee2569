// The links between the ranks of many hosts: a tree of switches, described level by level.
//
// Level 0 joins ranks (say, into hosts), level 1 joins units of level 0 (hosts into racks), and so
// on; all units of a level have as many members. A member has `num_links` links into its unit's
// switch, each with an upward and a downward half. A message goes up from its source to the lowest
// switch that is above its destination as well, and down from there. Switches themselves do not
// block: what is oversubscribed is said by the links above them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pycoll {

struct FabricLevel {
  std::string name;       // of a unit: "host", "rack"
  int32_t size = 1;       // members of a unit
  int32_t num_links = 1;  // of each member; a rank uses number (its index in the member) modulo it
  // Link i of every member goes to a switch of its own, i, and messages change to the rank whose
  // link it is inside the source's member: what NCCL calls PXN, and builders rail-optimised.
  bool rails = false;
  // Whether messages that leave the unit use this level's links: false for NVLink, which is not on
  // the way from a GPU to the network.
  bool carries_outside = true;
  double link_bytes_per_s = 0;
  double latency_s = 0;  // one way, between two members of a unit, all of the way
  // size x size, row by source member; empty: the same for all. A pair's circuit is a link that
  // all messages between two members share, besides the members' own links.
  std::vector<double> pair_bytes_per_s;
  std::vector<double> pair_latency_s;
};

/// What a message costs its rank, whatever the way.
struct RankCost {
  double overhead_s = 0;        // per message sent; meanwhile the rank does nothing else
  double gamma_s_per_byte = 0;  // of every operand after the first
  double start_s = 0;           // when it enters the collective
};

class Fabric {
 public:
  /// Raises UsageError when there is no level, or one has no members, links or bandwidth.
  explicit Fabric(std::vector<FabricLevel> levels);

  int32_t num_ranks() const { return num_ranks_; }
  const std::vector<FabricLevel>& levels() const { return levels_; }
  /// Ranks of a unit of level `level`.
  int32_t ranks_per_unit(int level) const { return members_of_[static_cast<size_t>(level) + 1]; }

  std::vector<RankCost>& ranks() { return ranks_; }
  const std::vector<RankCost>& ranks() const { return ranks_; }

  int64_t num_links() const { return static_cast<int64_t>(link_bytes_per_s_.size()); }
  double link_bytes_per_s(int64_t link) const {
    return link_bytes_per_s_[static_cast<size_t>(link)];
  }
  int link_level(int64_t link) const;
  /// `host 3, link 5 up`, for people.
  std::string link_name(int64_t link) const;
  /// Multiplies the bandwidth of the links that member `member` (of the whole world) has into the
  /// switch of its unit of level `level`. Raises UsageError.
  void scale_links(int level, int32_t member, double factor);

  /// The lowest level whose unit holds both.
  int common_level(int32_t src, int32_t dst) const;
  double latency_s(int32_t src, int32_t dst) const;
  /// Appends the links that a message from src to dst crosses.
  void route(int32_t src, int32_t dst, std::vector<int32_t>& links) const;

 private:
  struct Range {
    int64_t first_link = 0;   // of the level: members x num_links x (up, down)
    int64_t first_pair = 0;   // of the level's circuits: units x size x size
    int64_t num_members = 0;  // in the whole world
  };
  int32_t link_of(int level, int32_t rank, int32_t lane, bool down) const;
  int32_t lane_of(int level, int32_t rank) const;
  void climb(int32_t rank, int32_t lane, int top, bool down, std::vector<int32_t>& links) const;

  std::vector<FabricLevel> levels_;
  std::vector<int32_t> members_of_;  // [l]: ranks of one member of level l; the last: of the world
  std::vector<Range> ranges_;
  std::vector<double> link_bytes_per_s_;
  std::vector<RankCost> ranks_;
  int32_t num_ranks_ = 1;
};

}  // namespace pycoll
