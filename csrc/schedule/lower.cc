#include "schedule/lower.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <tuple>

#include "base/error.h"
#include "schedule/phases.h"
#include "schedule/split.h"

namespace pycoll {
namespace {

struct Send {
  int32_t src;
  ChunkRange chunks;
  std::vector<int32_t> dsts;
};

struct Receive {
  int32_t dst = 0;
  ChunkRange chunks;
  MoveKind kind = MoveKind::kCopy;
  std::vector<int32_t> srcs;
};

// Rank and range of chunks. Both ends of a link order a round's messages by ascending range.
using GroupKey = std::tuple<int32_t, int32_t, int32_t>;

std::vector<Send> group_sends(std::span<const Move> moves) {
  std::map<GroupKey, std::vector<int32_t>> groups;
  for (const Move& move : moves) {
    groups[{move.src, move.chunks.first, move.chunks.count}].push_back(move.dst);
  }
  std::vector<Send> sends;
  for (auto& [key, dsts] : groups) {
    const auto [src, first, count] = key;
    sends.push_back({src, {first, count}, std::move(dsts)});
  }
  return sends;
}

std::vector<Receive> group_receives(std::span<const Move> moves) {
  std::map<GroupKey, Receive> groups;
  for (const Move& move : moves) {
    Receive& receive = groups[{move.dst, move.chunks.first, move.chunks.count}];
    receive.dst = move.dst;
    receive.chunks = move.chunks;
    receive.kind = move.kind;
    receive.srcs.push_back(move.src);
  }
  std::vector<Receive> receives;
  for (auto& [key, receive] : groups) receives.push_back(std::move(receive));
  return receives;
}

/// Orders the sends of a round whose messages have one destination each: every rank starts with its
/// next neighbour, so that not all start with rank 0. The messages of one link keep their order.
void spread_over_destinations(std::vector<Send>& sends, int num_ranks) {
  const auto distance = [&](const Send& send) {
    return (send.dsts[0] - send.src + num_ranks) % num_ranks;
  };
  if (std::all_of(sends.begin(), sends.end(), [](const Send& s) { return s.dsts.size() == 1; })) {
    std::stable_sort(sends.begin(), sends.end(),
                     [&](const Send& a, const Send& b) { return distance(a) < distance(b); });
  }
}

/// Counts how many ranks' start values each rank's chunks contain, while the rounds are lowered.
class Contributions {
 public:
  explicit Contributions(const Schedule& schedule)
      : schedule_(schedule),
        num_ranks_(schedule.num_ranks),
        has_final_(schedule.has_reduced_goal()) {
    if (!has_final_) return;
    const CollectiveInfo& row = info(schedule.collective);
    counts_.assign(num_ranks_, std::vector<int32_t>(schedule.num_chunks));
    for (int rank = 0; rank < num_ranks_; ++rank) {
      for (int chunk = 0; chunk < schedule.num_chunks; ++chunk) {
        counts_[rank][chunk] = row.starts_with_value(schedule.block_at(rank, chunk));
      }
    }
  }

  /// Applies one round. Returns for each receive whether it completes the reduction of its chunks.
  std::vector<bool> advance(std::span<const Receive> receives, int round) {
    if (!has_final_) return std::vector<bool>(receives.size(), false);
    std::vector<bool> completes;
    std::vector<std::vector<int32_t>> results;  // stored below, since all receives read old values
    for (const Receive& receive : receives) {
      std::vector<int32_t>& result = results.emplace_back();
      for (int chunk = receive.chunks.first; chunk < receive.chunks.end(); ++chunk) {
        int32_t count = receive.kind == MoveKind::kReduce ? counts_[receive.dst][chunk] : 0;
        for (int32_t src : receive.srcs) count += counts_[src][chunk];
        result.push_back(count);
      }
      const auto num_complete = std::count(result.begin(), result.end(), num_ranks_);
      const bool reduces = receive.kind == MoveKind::kReduce;
      if (reduces && num_complete != 0 && num_complete != receive.chunks.count) {
        throw UsageError(
            schedule_.algorithm + ", round " + std::to_string(round) + ", rank " +
            std::to_string(receive.dst) + ": chunks " + std::to_string(receive.chunks.first) +
            ".." + std::to_string(receive.chunks.end() - 1) +
            " arrive in one move, but the reduction of only some of them becomes complete: "
            "write them as separate moves");
      }
      completes.push_back(reduces && num_complete != 0);
    }
    for (size_t i = 0; i < receives.size(); ++i) {
      std::copy(results[i].begin(), results[i].end(),
                counts_[receives[i].dst].begin() + receives[i].chunks.first);
    }
    return completes;
  }

 private:
  const Schedule& schedule_;
  const int32_t num_ranks_;
  const bool has_final_;
  std::vector<std::vector<int32_t>> counts_;  // [rank][chunk]
};

std::vector<Program> make_programs(const Schedule& schedule) {
  const CollectiveInfo& row = info(schedule.collective);
  std::vector<Program> programs(schedule.num_ranks);
  int32_t max_range = 1;
  for (const Move& move : schedule.moves) {
    max_range = std::max(max_range, move.chunks.count);
    programs[move.src].peers.push_back(move.dst);
    programs[move.dst].peers.push_back(move.src);
  }
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    Program& program = programs[rank];
    program.rank = rank;
    program.num_ranks = schedule.num_ranks;
    program.num_chunks = schedule.num_chunks;
    program.num_blocks = num_blocks(row.blocks, schedule.num_ranks);
    program.blocks_per_payload = row.blocks_per_payload(schedule.num_ranks);
    program.max_range = max_range;
    std::vector<int32_t>& peers = program.peers;
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    if (peers.size() > kMaxPeers) {
      throw UsageError(schedule.algorithm + ": rank " + std::to_string(rank) + " would have " +
                       std::to_string(peers.size()) + " peers; at most " +
                       std::to_string(kMaxPeers) + " are possible");
    }
    program.self_position =
        static_cast<int32_t>(std::lower_bound(peers.begin(), peers.end(), rank) - peers.begin());
  }
  return programs;
}

uint64_t mask_of(const Program& program, std::span<const int32_t> ranks) {
  uint64_t mask = 0;
  for (int32_t rank : ranks) {
    const auto at = std::lower_bound(program.peers.begin(), program.peers.end(), rank);
    mask |= uint64_t{1} << (at - program.peers.begin());
  }
  return mask;
}

/// Appends one round to the programs: every rank first sends its old values, then receives.
void lower_round(const Schedule& schedule, const LowerOptions& options, std::span<const Move> moves,
                 Contributions& contributions, std::vector<Program>& programs) {
  const int32_t round = moves[0].round;
  std::vector<Send> sends = group_sends(moves);
  const std::vector<Receive> receives = group_receives(moves);

  const bool multicast = schedule.multicast && options.multicast && schedule.num_ranks >= 3 &&
                         std::all_of(sends.begin(), sends.end(), [&](const Send& send) {
                           return send.dsts.size() == static_cast<size_t>(schedule.num_ranks) - 1;
                         });
  if (!schedule.multicast) {
    std::vector<Send> single;
    for (const Send& send : sends) {
      for (int32_t dst : send.dsts) single.push_back({send.src, send.chunks, {dst}});
    }
    sends = std::move(single);
  }
  spread_over_destinations(sends, schedule.num_ranks);

  for (const Send& send : sends) {
    Program& program = programs[send.src];
    Step step{.first_chunk = send.chunks.first, .num_chunks = send.chunks.count, .round = round};
    step.dst_peers = mask_of(program, send.dsts);
    step.flags = kReadLocal | (multicast ? kMulticastDst : 0);
    program.steps.push_back(step);
  }
  const std::vector<bool> completes = contributions.advance(receives, round);
  for (size_t i = 0; i < receives.size(); ++i) {
    const Receive& receive = receives[i];
    Program& program = programs[receive.dst];
    Step step{
        .first_chunk = receive.chunks.first, .num_chunks = receive.chunks.count, .round = round};
    step.src_peers = mask_of(program, receive.srcs);
    step.flags = kWriteLocal | (receive.kind == MoveKind::kReduce ? kReadLocal : 0) |
                 (multicast ? kMulticastSrc : 0) | (completes[i] ? kFinal : 0);
    program.steps.push_back(step);
  }
}

/// True when both steps write one link, so that they must keep their order. A rank's multicast ring
/// counts as a link.
bool share_link(const Step& a, const Step& b) {
  return a.has(kMulticastDst) == b.has(kMulticastDst) && (a.dst_peers & b.dst_peers) != 0;
}

/// Joins a receive with the send that passes its result on, so that the combined data needs no
/// second trip through memory. The send moves ahead of the steps in between, so none of them may
/// change its chunks or write its links. It must belong to the next round in which the rank sends,
/// since a later send would only delay the earlier ones.
void fuse(Program& program) {
  std::vector<Step>& steps = program.steps;
  for (auto receive = steps.begin(); receive != steps.end(); ++receive) {
    if (receive->src_peers == 0) continue;
    int32_t sending_round = -1;
    for (auto later = receive + 1; later != steps.end(); ++later) {
      if (later->dst_peers != 0) {
        if (sending_round == -1) sending_round = later->round;
        if (later->round != sending_round) break;
        const bool overtakes = std::any_of(
            receive + 1, later, [&](const Step& between) { return share_link(between, *later); });
        if (later->chunks() == receive->chunks() && !overtakes) {
          receive->dst_peers = later->dst_peers;
          receive->flags |= later->flags & kMulticastDst;
          steps.erase(later);
          break;
        }
      } else if (later->chunks().overlaps(receive->chunks())) {
        break;
      }
    }
  }
}

/// Removes local writes that neither a later step nor the caller reads.
void drop_dead_writes(const Schedule& schedule, Program& program) {
  std::vector<bool> is_read(program.num_chunks);
  for (int chunk = 0; chunk < program.num_chunks; ++chunk) {
    is_read[chunk] = info(schedule.collective).goal(schedule.block_at(program.rank, chunk)).kind !=
                     Goal::Kind::kAny;
  }
  for (auto step = program.steps.rbegin(); step != program.steps.rend(); ++step) {
    const auto first = is_read.begin() + step->first_chunk;
    const auto last = first + step->num_chunks;
    if (step->has(kWriteLocal)) {
      const bool dead = std::find(first, last, true) == last;
      // A step needs a destination, so a useless receive still stores.
      if (dead && step->dst_peers != 0) step->flags &= static_cast<uint8_t>(~kWriteLocal);
      std::fill(first, last, false);
    }
    if (step->has(kReadLocal)) std::fill(first, last, true);
  }
}

}  // namespace

std::vector<Program> lower(const Schedule& whole, const LowerOptions& options) {
  std::vector<int32_t> rounds;  // the round of `whole` for each round of `schedule`
  const bool cut = !options.join_blocks || !options.join_chunks;
  const int32_t chunks = options.join_chunks ? whole.pieces_per_block() : 1;
  const Schedule schedule = cut ? split_moves(whole, chunks, rounds) : whole;
  std::vector<Program> programs = make_programs(schedule);
  Contributions contributions(schedule);
  const std::span<const Move> moves(schedule.moves);
  for (size_t first = 0; first < moves.size();) {
    size_t last = first;
    while (last < moves.size() && moves[last].round == moves[first].round) ++last;
    lower_round(schedule, options, moves.subspan(first, last - first), contributions, programs);
    first = last;
  }
  for (Program& program : programs) {
    if (options.fuse) fuse(program);
    drop_dead_writes(schedule, program);
    if (options.phases) join_phases(program, PeerBytes::kOnLinks);
    if (!cut) continue;
    for (Step& step : program.steps) step.round = rounds[step.round];
  }
  return programs;
}

bool has_few_peers(const Schedule& schedule) {
  const auto n = static_cast<size_t>(schedule.num_ranks);
  if (n <= kMaxPeers + 1) return true;
  std::vector<bool> known(n * n);
  std::vector<int> num_peers(n);
  const auto meet = [&](int rank, int peer) {
    const size_t at = static_cast<size_t>(rank) * n + static_cast<size_t>(peer);
    if (known[at]) return true;
    known[at] = true;
    return ++num_peers[static_cast<size_t>(rank)] <= kMaxPeers;
  };
  return std::all_of(schedule.moves.begin(), schedule.moves.end(), [&](const Move& move) {
    return meet(move.src, move.dst) && meet(move.dst, move.src);
  });
}

}  // namespace pycoll
