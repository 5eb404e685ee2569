#include "algorithms/table/scripts.h"

#include <numeric>

#include "algorithms/table/registry.h"
#include "base/error.h"
#include "schedule/lower.h"

namespace pycoll {
namespace {

bool is_scattering(Collective collective) { return collective != Collective::kAllGather; }
bool is_gathering(Collective collective) { return collective != Collective::kReduceScatter; }

bool is_ring_like(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kAllGather;
}

/// The script of one rank in ring.cc, fused: 2n - 1 steps for an all_reduce, n for its halves.
Script ring_script(Collective collective, int32_t n, int32_t rank) {
  Script script;
  if (n == 1) return script;
  const int32_t next[] = {(rank + 1) % n};
  const int32_t prev[] = {(rank + n - 1) % n};
  const double part = 1.0 / n;
  script.add({}, next, /*reads_local=*/true, part);
  if (is_scattering(collective)) {
    // If an all-gather follows, the result of the last reduction is sent on as well.
    script.begin_loop(n - 2 + (is_gathering(collective) ? 1 : 0));
    script.add(prev, next, /*reads_local=*/true, part);
    script.end_loop();
  }
  if (is_gathering(collective)) {
    script.begin_loop(n - 2);
    script.add(prev, next, /*reads_local=*/false, part);
    script.end_loop();
  }
  script.add(prev, {}, /*reads_local=*/!is_gathering(collective), part);
  return script;
}

std::vector<Script> ring_scripts(Collective collective, int32_t n) {
  std::vector<Script> scripts;
  for (int32_t rank = 0; rank < n; ++rank) scripts.push_back(ring_script(collective, n, rank));
  return scripts;
}

/// Refuses schedules that do not fit in memory, by extrapolating the number of moves.
void check_num_moves(const AlgorithmInfo& row, int32_t n) {
  constexpr int32_t kSmall = 64;
  constexpr double kMostMoves = 2e7;
  constexpr double kMostValues = 4e8;  // ranks times chunks, which lowering visits
  if (n <= 4 * kSmall) return;
  const Schedule small = row.generate(kSmall, 0), twice = row.generate(2 * kSmall, 0);
  const auto grown = [&](double once, double twice_as_many) {
    const double factor = twice_as_many / once;
    double value = twice_as_many;
    for (double ranks = 2 * kSmall; ranks < n; ranks *= 2) value *= factor;
    return value;
  };
  const double moves =
      grown(static_cast<double>(small.moves.size()), static_cast<double>(twice.moves.size()));
  const double values = n * grown(small.num_chunks, twice.num_chunks);
  if (moves <= kMostMoves && values <= kMostValues) return;
  throw UsageError(std::string(info(row.collective).name) + " " + std::string(row.name) + " of " +
                   std::to_string(n) + " ranks has too many moves to simulate (about " +
                   std::to_string(static_cast<int64_t>(moves)) +
                   "); use ring, tree or hierarchical");
}

std::vector<Script> lowered_scripts(const ScriptRequest& request) {
  const AlgorithmInfo& row = find_algorithm(request.collective, request.algorithm);
  check_num_moves(row, request.num_ranks);
  std::vector<Script> scripts;
  // Slots between hosts have one reader.
  const LowerOptions options{.multicast = false};
  for (const Program& program : lower(row.generate(request.num_ranks, request.root), options)) {
    scripts.push_back(script_of(program));
  }
  return scripts;
}

/// Runs a ring inside every group, smallest groups first, each on the part of the message that the
/// smaller groups leave; then `between` for the ranks with the same place in the last groups; then
/// the rings in reverse order.
class Hierarchy {
 public:
  explicit Hierarchy(const ScriptRequest& request)
      : request_(request), scripts_(static_cast<size_t>(request.num_ranks)) {
    if (!is_ring_like(request.collective)) {
      throw UsageError(std::string("no hierarchical scripts for ") +
                       std::string(info(request.collective).name) +
                       ": expected all_reduce, reduce_scatter or all_gather");
    }
    int32_t below = 1;
    for (int32_t group : request.groups) {
      if (group <= 0 || group % below != 0 || request.num_ranks % group != 0) {
        throw UsageError("hierarchical: groups of " + std::to_string(group) +
                         " ranks do not divide " + std::to_string(request.num_ranks) +
                         " ranks into groups of groups");
      }
      sizes_.push_back(group / below);
      below = group;
    }
    sizes_.push_back(request.num_ranks / below);
  }

  std::vector<Script> build() {
    const size_t top = sizes_.size() - 1;
    if (is_scattering(request_.collective)) {
      for (size_t level = 0; level < top; ++level) {
        add(level, ring_scripts(Collective::kReduceScatter, sizes_[level]));
      }
    }
    ScriptRequest between = request_;
    between.algorithm = request_.between;
    between.num_ranks = sizes_[top];
    between.groups.clear();
    add(top, make_scripts(between));
    if (is_gathering(request_.collective)) {
      for (size_t level = top; level-- > 0;) {
        add(level, ring_scripts(Collective::kAllGather, sizes_[level]));
      }
    }
    return std::move(scripts_);
  }

 private:
  /// Adds a level: all its groups do the same, each with its own ranks.
  void add(size_t level, const std::vector<Script>& scripts) {
    int32_t stride = 1;
    for (size_t l = 0; l < level; ++l) stride *= sizes_[l];
    std::vector<int32_t> members(static_cast<size_t>(sizes_[level]));
    for (int32_t first = 0; first < request_.num_ranks; ++first) {
      if (first / stride % sizes_[level] != 0) continue;
      for (int32_t i = 0; i < sizes_[level]; ++i) {
        members[static_cast<size_t>(i)] = first + i * stride;
      }
      for (size_t i = 0; i < members.size(); ++i) {
        scripts_[static_cast<size_t>(members[i])].append(scripts[i], members, 1.0 / stride);
      }
    }
  }

  const ScriptRequest& request_;
  std::vector<int32_t> sizes_;  // group size of each level; the last: number of the last groups
  std::vector<Script> scripts_;
};

}  // namespace

std::vector<Script> make_scripts(const ScriptRequest& request) {
  if (request.num_ranks < 1) {
    throw UsageError("expected at least one rank, got " + std::to_string(request.num_ranks));
  }
  if (request.algorithm == "hierarchical") return Hierarchy(request).build();
  if (request.algorithm == "ring" && is_ring_like(request.collective)) {
    return ring_scripts(request.collective, request.num_ranks);
  }
  return lowered_scripts(request);
}

}  // namespace pycoll
