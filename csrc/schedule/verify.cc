#include "schedule/verify.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "schedule/explain.h"
#include "schedule/expressions.h"

namespace pycoll {
namespace {

/// The reason why the programs are wrong; caught in verify().
struct Refuted {
  std::string why;
};

std::string place_text(const Program& program, size_t step_idx) {
  const Step& step = program.steps[step_idx];
  return "rank " + std::to_string(program.rank) + ", step " + std::to_string(step_idx) +
         " (round " + std::to_string(step.round) + ", " + explain_step(program, step) + ")";
}

std::string interval_text(const ChunkRange& chunks) {
  return "chunks [" + std::to_string(chunks.first) + ", " + std::to_string(chunks.end()) + ")";
}

void check_header(const Schedule& schedule, const Program& program, int rank) {
  const auto require = [&](bool holds, const char* what) {
    if (!holds) throw Refuted{"the program of rank " + std::to_string(rank) + " has " + what};
  };
  require(program.rank == rank, "another rank's number");
  require(program.num_ranks == schedule.num_ranks, "another number of ranks");
  require(program.num_chunks == schedule.num_chunks, "another number of chunks");
  require(program.peers.size() <= kMaxPeers, "too many peers");
  int32_t num_below = 0;
  for (size_t i = 0; i < program.peers.size(); ++i) {
    const int32_t peer = program.peers[i];
    require(peer >= 0 && peer < schedule.num_ranks && peer != rank,
            "a peer that is not another rank");
    require(i == 0 || program.peers[i - 1] < peer, "peers that are not in ascending order");
    if (peer < rank) ++num_below;
  }
  require(program.self_position == num_below, "a wrong place for its own chunks among its peers");
}

void check_step(const Program& program, size_t step_idx) {
  const Step& step = program.steps[step_idx];
  const auto require = [&](bool holds, const char* what) {
    if (!holds) {
      throw Refuted{"rank " + std::to_string(program.rank) + ", step " + std::to_string(step_idx) +
                    " " + what};
    }
  };
  constexpr int kAllFlags =
      kReadLocal | kWriteLocal | kFinal | kMulticastSrc | kMulticastDst | kSamePhase;
  const size_t num_peers = program.peers.size();
  const uint64_t all_peers = num_peers == 64 ? ~uint64_t{0} : (uint64_t{1} << num_peers) - 1;
  require((step.flags & ~kAllFlags) == 0, "has unknown flags");
  require(step.first_chunk >= 0 && step.num_chunks >= 1 &&
              step.num_chunks <= program.num_chunks - step.first_chunk,
          "names chunks that do not exist");
  require(step.num_chunks <= program.max_range, "names more chunks than a slot holds");
  require(((step.src_peers | step.dst_peers) & ~all_peers) == 0,
          "names a peer that does not exist");
  require(step.src_peers != 0 || step.has(kReadLocal), "has no source");
  require(step.dst_peers != 0 || step.has(kWriteLocal), "has no destination");
  require(step.src_peers != 0 || !step.has(kMulticastSrc),
          "reads a multicast ring without a source");
  require(!step.has(kMulticastDst) || (step.dst_peers == all_peers &&
                                       num_peers + 1 == static_cast<size_t>(program.num_ranks)),
          "writes its multicast ring without all ranks as destinations");
}

/// Refuses a phase whose steps cannot run in any order, or in parts.
void check_phase(const Program& program, size_t first, size_t end, PeerBytes peer_bytes) {
  const bool in_place = peer_bytes == PeerBytes::kInPlace;  // a step uses its peers' chunks, too
  constexpr size_t kNone = ~size_t{0};
  const auto num_chunks = static_cast<size_t>(program.num_chunks);
  // The step of the phase that reads and writes each chunk, and the ends of links, by the bit of
  // the peer.
  std::vector<size_t> reader(num_chunks, kNone);
  std::vector<size_t> writer(num_chunks, kNone);
  std::vector<size_t> src(kMaxPeers, kNone);
  std::vector<size_t> dst(kMaxPeers, kNone);
  size_t step_idx = first;
  const auto require_free = [&](size_t other, const char* what, int32_t number) {
    if (other == kNone || other == step_idx) return;
    throw Refuted{place_text(program, step_idx) + " is in one phase with step " +
                  std::to_string(other) + ", which " + what + std::to_string(number)};
  };
  if (end - first > kMaxPhaseSteps) {
    throw Refuted{place_text(program, first) + " begins a phase of " + std::to_string(end - first) +
                  " steps, more than " + std::to_string(kMaxPhaseSteps)};
  }
  for (; step_idx < end; ++step_idx) {
    const Step& step = program.steps[step_idx];
    for (int32_t c = step.first_chunk; c < step.chunks().end(); ++c) {
      const auto chunk = static_cast<size_t>(c);
      require_free(writer[chunk], "writes chunk ", c);
      if (step.has(kWriteLocal) || (in_place && step.dst_peers != 0)) {
        require_free(reader[chunk], "reads chunk ", c);
        writer[chunk] = step_idx;
      }
      if (step.has(kReadLocal) || (in_place && step.src_peers != 0)) reader[chunk] = step_idx;
    }
    for (size_t i = 0; i < program.peers.size(); ++i) {
      if ((step.src_peers >> i & 1) != 0) {
        require_free(src[i], "also receives from rank ", program.peers[i]);
        src[i] = step_idx;
      }
      if ((step.dst_peers >> i & 1) != 0) {
        require_free(dst[i], "also sends to rank ", program.peers[i]);
        dst[i] = step_idx;
      }
    }
  }
}

void check_phases(const Program& program, PeerBytes peer_bytes) {
  const size_t num_steps = program.steps.size();
  if (num_steps != 0 && program.steps[0].has(kSamePhase)) {
    throw Refuted{place_text(program, 0) + " has no phase to join"};
  }
  for (size_t first = 0; first < num_steps;) {
    const auto end = static_cast<size_t>(phase_end(
        program.steps.data(), static_cast<int32_t>(first), static_cast<int32_t>(num_steps)));
    if (end - first > 1) check_phase(program, first, end, peer_bytes);
    first = end;
  }
}

/// Executes the programs, one tile, on symbolic values.
class Machine {
 public:
  Machine(const Schedule& schedule, const std::vector<Program>& programs, int slots)
      : schedule_(schedule),
        programs_(programs),
        slots_(static_cast<size_t>(slots)),
        expressions_(schedule.num_ranks, schedule.num_chunks),
        next_step_(programs.size()) {
    for (int rank = 0; rank < schedule.num_ranks; ++rank) {
      std::vector<Value>& chunks = local_.emplace_back(schedule.num_chunks, kUndefined);
      for (int chunk = 0; chunk < schedule.num_chunks; ++chunk) {
        if (info(schedule.collective).starts_with_value(at(rank, chunk))) {
          chunks[chunk] = expressions_.start(rank, chunk);
        }
      }
    }
  }

  /// Returns the least canonical order of all reductions.
  Order run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (const Program& program : programs_) {
        while (next_step(program) < program.steps.size() && !wait_of(program)) {
          const size_t end = end_of_phase(program);
          for (; next_step(program) < end; ++next_step_[program.rank]) execute(program);
          moved = true;
        }
      }
    }
    for (const Program& program : programs_) {
      if (next_step(program) < program.steps.size()) throw Refuted{deadlock_text(program)};
    }
    check_links_empty();
    check_goal();
    return order_;
  }

 private:
  struct Message {
    ChunkRange chunks;
    std::vector<Value> values;
  };
  /// Each reader of a multicast ring has a queue here. The writer needs room in all of them, since
  /// a slot of the ring is free only when the slowest reader is done.
  using Link = std::tuple<bool, int32_t, int32_t>;  // is a multicast ring, writer, reader
  struct Wait {
    size_t step_idx;
    int32_t peer;
    bool for_free_slot;  // otherwise for a full one
  };

  BlockAt at(int rank, int chunk) const { return schedule_.block_at(rank, chunk); }
  size_t next_step(const Program& program) const { return next_step_[program.rank]; }
  size_t end_of_phase(const Program& program) const {
    return static_cast<size_t>(phase_end(program.steps.data(),
                                         static_cast<int32_t>(next_step(program)),
                                         static_cast<int32_t>(program.steps.size())));
  }
  std::string here(const Program& program) const { return place_text(program, next_step(program)); }
  std::deque<Message>& link_from(const Program& program, const Step& step, int32_t peer) {
    return links_[{step.has(kMulticastSrc), peer, program.rank}];
  }
  std::deque<Message>& link_to(const Program& program, const Step& step, int32_t peer) {
    return links_[{step.has(kMulticastDst), program.rank, peer}];
  }

  /// What the next phase still waits for; nothing when it can run.
  std::optional<Wait> wait_of(const Program& program) {
    const size_t end = end_of_phase(program);
    for (size_t step_idx = next_step(program); step_idx < end; ++step_idx) {
      const Step& step = program.steps[step_idx];
      for (size_t i = 0; i < program.peers.size(); ++i) {
        const int32_t peer = program.peers[i];
        if ((step.src_peers >> i & 1) != 0 && link_from(program, step, peer).empty()) {
          return Wait{step_idx, peer, false};
        }
        if ((step.dst_peers >> i & 1) != 0 && link_to(program, step, peer).size() >= slots_) {
          return Wait{step_idx, peer, true};
        }
      }
    }
    return std::nullopt;
  }

  void execute(const Program& program) {
    const Step& step = program.steps[next_step(program)];
    std::vector<std::vector<Value>> sources;  // in the order in which they are combined
    for (size_t i = 0; i <= program.peers.size(); ++i) {
      if (static_cast<size_t>(program.self_position) == i && step.has(kReadLocal)) {
        const auto first = local_[program.rank].begin() + step.first_chunk;
        sources.emplace_back(first, first + step.num_chunks);
      }
      if (i < program.peers.size() && (step.src_peers >> i & 1) != 0) {
        sources.push_back(receive(program, step, program.peers[i]));
      }
    }
    Message message{step.chunks(), {}};
    for (int32_t i = 0; i < step.num_chunks; ++i) {
      message.values.push_back(combine(program, step, sources, i));
    }
    if (step.has(kWriteLocal)) {
      std::copy(message.values.begin(), message.values.end(),
                local_[program.rank].begin() + step.first_chunk);
    }
    for (size_t i = 0; i < program.peers.size(); ++i) {
      if ((step.dst_peers >> i & 1) != 0) {
        link_to(program, step, program.peers[i]).push_back(message);
      }
    }
  }

  std::vector<Value> receive(const Program& program, const Step& step, int32_t peer) {
    std::deque<Message>& link = link_from(program, step, peer);
    Message message = std::move(link.front());
    link.pop_front();
    if (message.chunks != step.chunks()) {
      throw Refuted{here(program) + " expects " + interval_text(step.chunks()) + " from rank " +
                    std::to_string(peer) + ", but the link's next message holds " +
                    interval_text(message.chunks)};
    }
    return std::move(message.values);
  }

  /// The value of the step's i-th chunk.
  Value combine(const Program& program, const Step& step,
                const std::vector<std::vector<Value>>& sources, int32_t i) {
    const std::string chunk = "chunk " + std::to_string(step.first_chunk + i);
    std::vector<Value> operands;
    for (const std::vector<Value>& source : sources) {
      if (source[i] == kUndefined) {
        throw Refuted{here(program) + " reads " + chunk + " before it has a value"};
      }
      operands.push_back(source[i]);
    }
    const bool final = step.has(kFinal);
    if (final && operands.size() == 1 && expressions_.is_final(operands[0])) {
      throw Refuted{here(program) + " applies the operator's last factor to " + chunk +
                    " a second time"};
    }
    const std::optional<Value> value = expressions_.combine(operands, final);
    if (!value) {
      throw Refuted{here(program) + " counts a contribution to " + chunk + " twice"};
    }
    if (!final) return *value;
    if (!has_final_) {
      throw Refuted{here(program) + " applies the operator's last factor to " + chunk +
                    ", but this collective asks for no reduction of all ranks' values"};
    }
    if (const int rank = expressions_.first_missing(*value, schedule_.num_ranks); rank != -1) {
      throw Refuted{here(program) + " is marked as the end of the reduction of " + chunk +
                    ", but rank " + std::to_string(rank) + " has not contributed"};
    }
    return *value;
  }

  static constexpr size_t kMaxDeadlockText = 250;  // longer ones go on with "..."
  /// Follows the waits from one rank until they form a cycle or end at a rank that has finished.
  std::string deadlock_text(const Program& first) {
    std::string text = "deadlock: ";
    std::vector<bool> seen(programs_.size());
    const Program* program = &first;
    while (!seen[program->rank]) {
      seen[program->rank] = true;
      if (next_step(*program) == program->steps.size()) {
        return text + ", which has finished";
      }
      if (text.size() > kMaxDeadlockText) return text + "; ...";
      const Wait wait = *wait_of(*program);
      text += (program == &first ? "" : "; ") + place_text(*program, wait.step_idx) +
              " waits for " +
              (wait.for_free_slot ? "a free slot to rank " : "a message from rank ") +
              std::to_string(wait.peer);
      program = &programs_[wait.peer];
    }
    return text;
  }

  void check_links_empty() const {
    for (const auto& [key, link] : links_) {
      if (link.empty()) continue;
      const auto [is_ring, src, dst] = key;
      throw Refuted{"rank " + std::to_string(dst) + " never reads " +
                    interval_text(link.front().chunks) + " that rank " + std::to_string(src) +
                    " sends to it"};
    }
  }

  void check_goal() {
    for (int chunk = 0; chunk < schedule_.num_chunks; ++chunk) {
      Value reduced = kUndefined;  // the value of the ranks before
      for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
        const Goal goal = info(schedule_.collective).goal(at(rank, chunk));
        if (goal.kind == Goal::Kind::kAny) continue;
        const Value value = local_[rank][chunk];
        const auto require = [&](bool holds, const std::string& otherwise) {
          if (holds) return;
          throw Refuted{"rank " + std::to_string(rank) + ", chunk " + std::to_string(chunk) +
                        ", at the end: " + otherwise};
        };
        require(value != kUndefined, "no value has arrived");
        if (goal.kind == Goal::Kind::kStart) {
          if (value == expressions_.start(goal.source, chunk)) continue;
          require(false, "the value is not rank " + std::to_string(goal.source) + "'s");
        }
        check_contributors(goal, rank, value, require);
        order_ = std::max(order_, expressions_.order(value));
        if (goal.kind != Goal::Kind::kReduced) continue;
        // The reduction of a single rank's value is that value: nothing is left to apply.
        require(schedule_.num_ranks == 1 || expressions_.is_final(value),
                "the operator's last factor has not been applied");
        require(reduced == kUndefined || value == reduced,
                "the reduction was done in another order than on the ranks before");
        reduced = value;
      }
    }
  }

  template <typename Require>
  void check_contributors(const Goal& goal, int rank, Value value, const Require& require) const {
    int count = schedule_.num_ranks;
    if (goal.kind == Goal::Kind::kPrefix) count = rank + 1;
    if (goal.kind == Goal::Kind::kPrefixBefore) count = rank;
    const int missing = expressions_.first_missing(value, count);
    if (missing != -1) require(false, "rank " + std::to_string(missing) + " has not contributed");
    const int beyond = expressions_.first_beyond(value, count);
    if (beyond != -1) {
      require(false, "rank " + std::to_string(beyond) + " has contributed, but only ranks 0 to " +
                         std::to_string(count - 1) + " may");
    }
  }

  const Schedule& schedule_;
  const std::vector<Program>& programs_;
  const size_t slots_;
  const bool has_final_ = schedule_.has_reduced_goal();
  Order order_ = Order::kFlat;
  Expressions expressions_;
  std::vector<size_t> next_step_;
  std::vector<std::vector<Value>> local_;  // [rank][chunk]
  std::map<Link, std::deque<Message>> links_;
};

}  // namespace

Proof verify(const Schedule& schedule, const std::vector<Program>& programs, int slots) {
  Proof proof;
  proof.slots = slots;
  try {
    if (slots < 1) throw Refuted{"a link needs at least one slot"};
    if (programs.size() != static_cast<size_t>(schedule.num_ranks)) {
      throw Refuted{"there are " + std::to_string(programs.size()) + " programs"};
    }
    for (int rank = 0; rank < schedule.num_ranks; ++rank) {
      check_header(schedule, programs[rank], rank);
      for (size_t i = 0; i < programs[rank].steps.size(); ++i) check_step(programs[rank], i);
      check_phases(programs[rank], PeerBytes::kOnLinks);
    }
    proof.order = Machine(schedule, programs, slots).run();
    proof.ok = true;
  } catch (const Refuted& refuted) {
    proof.error = std::string(info(schedule.collective).name) + " " + schedule.algorithm + ", " +
                  std::to_string(schedule.num_ranks) + " ranks, " + std::to_string(slots) +
                  (slots == 1 ? " slot: " : " slots: ") + refuted.why;
  }
  return proof;
}

std::string find_wrong_phase(const Program& program, PeerBytes peer_bytes) {
  try {
    check_phases(program, peer_bytes);
    return "";
  } catch (const Refuted& refuted) {
    return refuted.why;
  }
}

int min_safe_slots(const Schedule& schedule, const std::vector<Program>& programs, int max_slots,
                   std::string* error, Order* order) {
  const Proof with_most = verify(schedule, programs, max_slots);
  if (!with_most.ok) {
    if (error != nullptr) *error = with_most.error;
    return 0;
  }
  if (order != nullptr) *order = with_most.order;
  int slots = 1;
  while (!verify(schedule, programs, slots).ok) ++slots;
  return slots;
}

}  // namespace pycoll
