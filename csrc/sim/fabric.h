// The links between the ranks of many hosts: a tree of switches, described level by level.
//
// Level 0 joins ranks (say, into hosts), level 1 joins units of level 0 (hosts into racks), and so
// on; all units of a level have equally many members. A member has `num_links` links to its unit's
// switch, one half of each upward and the other downward. A message goes up from its source to the
// lowest switch that is also above its destination, and down from there. Switches do not block;
// oversubscription is modelled by the links above them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pycoll {

struct FabricLevel {
  std::string name;       // of a unit, such as "host" or "rack"
  int32_t size = 1;       // members of a unit
  int32_t num_links = 1;  // of each member; a rank uses link (its index in the member) % num_links
  // Link i of every member goes to its own switch i. Inside the source's member, a message first
  // moves to the rank of the right link: NCCL calls this PXN, and builders call it rail-optimised.
  bool rails = false;
  // Whether messages that leave the unit use this level's links: false for NVLink, which is not
  // part of the route from a GPU to the network.
  bool carries_outside = true;
  double link_bytes_per_s = 0;
  double latency_s = 0;  // one way between two members of a unit, for the whole route
  // size x size, row by source member; empty: equal for all pairs. A pair's circuit is a link that
  // all messages between two members share, in addition to the members' own links.
  std::vector<double> pair_bytes_per_s;
  std::vector<double> pair_latency_s;
};

/// Costs of a rank, independent of the routes of its messages.
struct RankCost {
  double overhead_s = 0;        // per message sent, during which the rank does nothing else
  double gamma_s_per_byte = 0;  // of every operand after the first
  double start_s = 0;           // time at which it enters the collective
};

class Fabric {
 public:
  /// Raises UsageError when there is no level, or one has no members, links or bandwidth.
  explicit Fabric(std::vector<FabricLevel> levels);

  int32_t num_ranks() const { return num_ranks_; }
  const std::vector<FabricLevel>& levels() const { return levels_; }
  /// Number of ranks in a unit of level `level`.
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
  /// Multiplies the bandwidth of the links from member `member` (counted over all units) to the
  /// switch of its unit of level `level`. Raises UsageError for a wrong member, level or factor.
  void scale_links(int level, int32_t member, double factor);

  /// The lowest level whose unit contains both ranks.
  int common_level(int32_t src, int32_t dst) const;
  double latency_s(int32_t src, int32_t dst) const;
  /// Appends the links that a message from src to dst crosses.
  void route(int32_t src, int32_t dst, std::vector<int32_t>& links) const;

 private:
  struct Range {
    int64_t first_link = 0;   // of the level: members x num_links x (up, down)
    int64_t first_pair = 0;   // of the level's circuits: units x size x size
    int64_t num_members = 0;  // in all units together
  };
  int32_t link_of(int level, int32_t rank, int32_t lane, bool down) const;
  int32_t lane_of(int level, int32_t rank) const;
  void climb(int32_t rank, int32_t lane, int top, bool down, std::vector<int32_t>& links) const;

  std::vector<FabricLevel> levels_;
  std::vector<int32_t> members_of_;  // [l]: ranks of one member of level l; the last: all ranks
  std::vector<Range> ranges_;
  std::vector<double> link_bytes_per_s_;
  std::vector<RankCost> ranks_;
  int32_t num_ranks_ = 1;
};

}  // namespace pycoll
