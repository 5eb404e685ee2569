#include "plan/direct_plan.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <string>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/phases.h"
#include "schedule/verify.h"

namespace pycoll {
namespace {

// No slot is ever written, so the proof may assume links of any length.
constexpr int kManySlots = 1 << 20;

class DirectPlanner {
 public:
  explicit DirectPlanner(const Schedule& schedule, Writes writes = Writes::kPeers)
      : schedule_(schedule),
        writes_(writes),
        row_(info(schedule.collective)),
        programs_(lower(schedule, {.multicast = false, .join_blocks = false})) {}

  /// Raises UsageError when the schedule is wrong.
  void prove() {
    const Proof proof = verify(schedule_, programs_, kManySlots);
    if (!proof.ok) throw UsageError(proof.error);
    order_ = proof.order;
  }

  /// Determines which messages are pulls and which are pushes. False when one is neither.
  bool classify() {
    for (const Program& program : programs_) {
      num_moved_.push_back(num_own_copies(program));
      pulled_.emplace_back(program.steps.size(), 0);
      pushed_.emplace_back(program.steps.size(), 0);
      is_stored_push_.emplace_back(program.steps.size(), false);
      written_by_peers_.emplace_back(static_cast<size_t>(schedule_.num_chunks), false);
    }
    std::map<std::pair<int, int>, std::deque<int>> links;  // the sender's steps, in their order
    for (const Program& program : programs_) {
      for (size_t i = 0; i < program.steps.size(); ++i) {
        for_each(program, program.steps[i].dst_peers,
                 [&](int dst) { links[{program.rank, dst}].push_back(static_cast<int>(i)); });
      }
    }
    bool ok = true;
    for (const Program& program : programs_) {
      for (size_t j = 0; j < program.steps.size(); ++j) {
        for_each(program, program.steps[j].src_peers, [&](int src) {
          std::deque<int>& link = links[{src, program.rank}];
          ok = ok && classify(src, link.front(), program.rank, static_cast<int>(j));
          link.pop_front();
        });
        ok = ok && reads_own_input_only(program, j);
      }
    }
    return ok;
  }

  std::optional<DirectPlan> plan_of(int rank) {
    DirectPlan direct;
    Plan& plan = direct.plan;
    plan.collective = schedule_.collective;
    plan.algorithm = schedule_.algorithm;
    plan.order = order_;
    plan.programs_hash = hash_programs(programs_);
    plan.program = programs_[static_cast<size_t>(rank)];
    plan.program.steps = kept_steps(rank);
    std::optional<Placement> placement =
        place_chunks(schedule_, plan.program, written_by_peers_[static_cast<size_t>(rank)]);
    if (!placement || !placement->scratch.empty()) return std::nullopt;
    plan.placement = std::move(*placement);
    join_phases(plan.program, PeerBytes::kInPlace);
    if (std::string why = find_wrong_phase(plan.program, PeerBytes::kInPlace); !why.empty()) {
      throw UsageError(plan.algorithm + "/direct: " + why);
    }
    for (size_t i = 0; i < plan.program.steps.size(); ++i) {
      if (!place_at_peers(plan.program, plan.program.steps[i], plan.placement.steps[i])) {
        return std::nullopt;
      }
    }
    for (const Step& step : programs_[static_cast<size_t>(rank)].steps) {
      if (step.dst_peers == 0) continue;
      const int32_t pieces = schedule_.pieces_per_block();
      direct.given.push_back({step.first_chunk / pieces, step.first_chunk % pieces, step.num_chunks,
                              std::popcount(step.dst_peers)});
    }
    if (writes_ == Writes::kOwnOnly) add_results(rank, direct);
    return direct;
  }

  bool in_place_allowed() const {
    if (row_.blocks != Blocks::kOne) return true;  // a rank's output may hold only its own block
    // The rank that writes a chunk and the ranks that read it, by rank and chunk.
    std::map<std::pair<int, int>, int> writer;
    for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
      for (const Step& step : kept_steps(rank)) {
        for_each_chunk(step, [&](int chunk) {
          if (step.has(kWriteLocal)) writer[{rank, chunk}] = rank;
          for_each(program(rank), step.dst_peers, [&](int peer) { writer[{peer, chunk}] = rank; });
        });
      }
    }
    bool ok = true;
    for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
      for (const Step& step : kept_steps(rank)) {
        for_each_chunk(step, [&](int chunk) {
          const auto check = [&](int where) {
            const auto found = writer.find({where, chunk});
            ok = ok && (found == writer.end() || found->second == rank);
          };
          if (step.has(kReadLocal)) check(rank);
          for_each(program(rank), step.src_peers, check);
        });
      }
    }
    return ok;
  }

  /// Notes which ranks' inputs a rank reads, by rank and chunk: peers', its own, and that in copies
  /// outside the program. False when another rank reads one of these chunks, too.
  bool note_reads(int rank, const Plan& plan, std::map<std::pair<int, int>, int>& reader) const {
    bool ok = true;
    const auto note = [&](int owner, int chunk) {
      ok = reader.insert({{owner, chunk}, rank}).first->second == rank && ok;
    };
    for (const Step& step : plan.program.steps) {
      for_each_chunk(step, [&](int chunk) {
        if (step.has(kReadLocal)) note(rank, chunk);
        for_each(plan.program, step.src_peers, [&](int peer) { note(peer, chunk); });
      });
    }
    const int pieces = schedule_.pieces_per_block();
    const Placement& placement = plan.placement;
    for (const auto* copies : {&placement.before, &placement.any_time, &placement.after}) {
      for (const BlockCopy& copy : *copies) {
        for (int piece = 0; piece < pieces; ++piece) note(rank, copy.block * pieces + piece);
      }
    }
    return ok;
  }

  static void add_work(const Plan& plan, DirectWork& work) {
    for (const Step& step : plan.program.steps) {
      const int num_remote = std::popcount(step.src_peers) + std::popcount(step.dst_peers);
      const int num_srcs = std::popcount(step.src_peers) + (step.has(kReadLocal) ? 1 : 0);
      const double blocks = static_cast<double>(step.num_chunks) / plan.placement.num_pieces;
      work.num_accesses += num_remote;
      work.remote += num_remote * blocks;
      work.combined += std::max(0, num_srcs - 1) * blocks;
    }
  }

 private:
  const Program& program(int rank) const { return programs_[static_cast<size_t>(rank)]; }

  template <class Visit>
  static void for_each(const Program& program, uint64_t mask, Visit&& visit) {
    for (; mask != 0; mask &= mask - 1) {
      visit(program.peers[static_cast<size_t>(std::countr_zero(mask))]);
    }
  }
  template <class Visit>
  static void for_each_chunk(const Step& step, Visit&& visit) {
    for (int chunk = step.first_chunk; chunk < step.chunks().end(); ++chunk) visit(chunk);
  }
  static uint64_t bit_of(const Program& program, int peer) {
    const auto at = std::lower_bound(program.peers.begin(), program.peers.end(), peer);
    return uint64_t{1} << (at - program.peers.begin());
  }
  BlockAt at(int rank, const Step& step) const {
    return schedule_.block_at(rank, step.first_chunk);
  }

  /// Whether the start value of the step's chunks belongs into the rank's own output, too.
  bool copies_to_output(int rank, const Step& step) const {
    return row_.blocks != Blocks::kOne && row_.output_block(at(rank, step)) != kNoBlock;
  }
  /// Chunks that a rank copies from its own input to its output.
  int num_own_copies(const Program& program) const {
    if (row_.blocks == Blocks::kOne) return 0;  // a broadcast's input is its output
    int count = 0;
    for (int chunk = 0; chunk < schedule_.num_chunks; ++chunk) {
      const BlockAt at = schedule_.block_at(program.rank, chunk);
      const bool is_written =
          std::any_of(program.steps.begin(), program.steps.end(), [&](const Step& step) {
            return step.has(kWriteLocal) && step.chunks().overlaps({chunk, 1});
          });
      count += !is_written && row_.starts_with_value(at) && row_.output_block(at) != kNoBlock;
    }
    return count;
  }

  /// True when no step before `index` wrote these chunks, so they hold the start value.
  static bool is_start_value(const Program& program, size_t index) {
    const ChunkRange chunks = program.steps[index].chunks();
    return std::none_of(
        program.steps.begin(), program.steps.begin() + static_cast<long>(index),
        [&](const Step& step) { return step.has(kWriteLocal) && step.chunks().overlaps(chunks); });
  }
  static bool reads_own_input_only(const Program& program, size_t index) {
    return !program.steps[index].has(kReadLocal) || is_start_value(program, index);
  }
  /// True when no other step of the program touches the step's chunks, except for earlier sends of
  /// their start value.
  static bool is_only_store(const Program& program, size_t index) {
    const Step& store = program.steps[index];
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const Step& step = program.steps[i];
      if (i == index || !step.chunks().overlaps(store.chunks())) continue;
      const bool is_plain_send = step.src_peers == 0 && !step.has(kWriteLocal);
      if (!is_plain_send || i > index) return false;
    }
    return true;
  }

  bool classify(int src, int send_idx, int dst, int receive_idx) {
    const Program& sender = program(src);
    const Program& receiver = program(dst);
    const auto i = static_cast<size_t>(send_idx);
    const auto j = static_cast<size_t>(receive_idx);
    const Step& send = sender.steps[i];
    const Step& receive = receiver.steps[j];
    const bool can_pull = send.src_peers == 0 && send.has(kReadLocal) && is_start_value(sender, i);
    const bool only_stores = std::popcount(receive.src_peers) == 1 && receive.dst_peers == 0 &&
                             !receive.has(kReadLocal) && receive.has(kWriteLocal);
    const bool can_push = only_stores && is_only_store(receiver, j) &&
                          row_.output_block(at(dst, receive)) != kNoBlock;
    // If both ends can move the chunks, the one with fewer chunks to move does, or a sender that
    // copies them to its own output anyway: it reads them once for both (decision 0133).
    int& sender_moves = num_moved_[static_cast<size_t>(src)];
    int& receiver_moves = num_moved_[static_cast<size_t>(dst)];
    const bool own_only = writes_ == Writes::kOwnOnly;
    const bool sender_should = copies_to_output(src, send) || sender_moves < receiver_moves;
    if (can_pull && (!can_push || own_only || !sender_should)) {
      pulled_[static_cast<size_t>(src)][i] |= bit_of(sender, dst);
      receiver_moves += receive.num_chunks;
      return true;
    }
    if (!can_push || (own_only && !stays_in_output(src, i))) return false;
    sender_moves += send.num_chunks;
    pushed_[static_cast<size_t>(src)][i] |= bit_of(sender, dst);
    is_stored_push_[static_cast<size_t>(dst)][j] = true;
    for_each_chunk(receive, [&](int chunk) {
      written_by_peers_[static_cast<size_t>(dst)][static_cast<size_t>(chunk)] = true;
    });
    return true;
  }

  /// True when the chunks of a step are in this rank's output from that step on.
  bool stays_in_output(int rank, size_t index) const {
    const std::vector<Step>& steps = program(rank).steps;
    const Step& push = steps[index];
    if (!push.has(kWriteLocal) || row_.output_block(at(rank, push)) == kNoBlock) return false;
    return std::none_of(steps.begin() + static_cast<long>(index) + 1, steps.end(),
                        [&](const Step& later) {
                          return later.has(kWriteLocal) && later.chunks().overlaps(push.chunks());
                        });
  }

  void add_results(int rank, DirectPlan& direct) const {
    for (const std::vector<bool>& is_stored : is_stored_push_) {
      direct.has_results = direct.has_results ||
                           std::find(is_stored.begin(), is_stored.end(), true) != is_stored.end();
    }
    const int32_t pieces = schedule_.pieces_per_block();
    Plan& results = direct.results;
    results.collective = schedule_.collective;
    results.algorithm = schedule_.algorithm;
    results.program = program(rank);
    results.program.steps.clear();
    results.placement.num_pieces = pieces;
    for (size_t j = 0; j < program(rank).steps.size(); ++j) {
      if (!is_stored_push_[static_cast<size_t>(rank)][j]) continue;
      const Step& step = program(rank).steps[j];
      const int sender = program(rank).peers[static_cast<size_t>(std::countr_zero(step.src_peers))];
      StepPlace place;
      place.block = step.first_chunk / pieces;
      place.first_piece = step.first_chunk % pieces;
      place.dst_index = row_.output_block(at(rank, step));
      place.peer_src_index = row_.output_block(at(sender, step));
      results.program.steps.push_back(step);
      results.placement.steps.push_back(place);
    }
  }

  /// The steps that remain for a rank, without sends of pulled and stores of pushed messages.
  std::vector<Step> kept_steps(int rank) const {
    std::vector<Step> kept;
    const auto r = static_cast<size_t>(rank);
    for (size_t i = 0; i < program(rank).steps.size(); ++i) {
      Step step = program(rank).steps[i];
      step.dst_peers &= writes_ == Writes::kOwnOnly ? 0 : ~pulled_[r][i];
      if (is_stored_push_[r][i] || (step.dst_peers == 0 && !step.has(kWriteLocal))) continue;
      kept.push_back(step);
    }
    return kept;
  }

  /// True when all peers of a step hold its blocks at the same index of their buffers.
  bool place_at_peers(const Program& program, const Step& step, StepPlace& place) const {
    bool ok = true;
    const auto unify = [&](auto index_of, int32_t& index, uint64_t mask) {
      index = kNoBlock;
      for_each(program, mask, [&](int peer) {
        const int there = index_of(at(peer, step));
        ok = ok && there != kNoBlock && (index == kNoBlock || index == there);
        index = there;
      });
    };
    unify(row_.input_block, place.peer_src_index, step.src_peers);
    unify(row_.output_block, place.peer_dst_index, step.dst_peers);
    return ok;
  }

  const Schedule& schedule_;
  const Writes writes_;
  const CollectiveInfo& row_;
  std::vector<Program> programs_;
  Order order_ = Order::kOther;
  // Destinations of pulled and of pushed messages, by rank and step.
  std::vector<std::vector<uint64_t>> pulled_;
  std::vector<int> num_moved_;  // chunks, by rank, with its own
  std::vector<std::vector<uint64_t>> pushed_;
  std::vector<std::vector<bool>> is_stored_push_;    // by rank and step of the receiver
  std::vector<std::vector<bool>> written_by_peers_;  // by rank and chunk
};

}  // namespace

std::optional<DirectPlan> make_direct_plan(const Schedule& schedule, int rank, Writes writes) {
  DirectPlanner planner(schedule, writes);
  planner.prove();
  if (!planner.classify()) return std::nullopt;
  std::optional<DirectPlan> mine;
  std::map<std::pair<int, int>, int> reader;
  bool has_sole_readers = true;
  // All ranks must compute the same answer.
  for (int other = 0; other < schedule.num_ranks; ++other) {
    std::optional<DirectPlan> direct = planner.plan_of(other);
    if (!direct) return std::nullopt;
    has_sole_readers = planner.note_reads(other, direct->plan, reader) && has_sole_readers;
    if (other == rank) mine = std::move(direct);
  }
  mine->in_place_allowed = planner.in_place_allowed();
  mine->has_sole_readers = has_sole_readers;
  return mine;
}

std::vector<DirectWork> direct_work(const Schedule& schedule, Writes writes) {
  DirectPlanner planner(schedule, writes);
  if (!planner.classify()) return {};
  std::vector<DirectWork> work;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    const std::optional<DirectPlan> direct = planner.plan_of(rank);
    if (!direct) return {};
    DirectPlanner::add_work(direct->plan, work.emplace_back());
    if (direct->has_results) DirectPlanner::add_work(direct->results, work.back());
  }
  return work;
}

}  // namespace pycoll
