#include "schedule/simulate.h"

#include <algorithm>
#include <map>
#include <queue>
#include <string>
#include <tuple>

#include "base/error.h"
#include "schedule/explain.h"

namespace pycoll {
namespace {

constexpr int64_t kMaxMessages = 1'000'000'000;  // minutes of simulation

/// A rank executes one step at a time: it waits for its sources and for free slots, combines, and
/// makes one transfer after another. This makes a rank's sending port sequential; its receiving
/// port takes transfers in the order in which they became ready.
class Simulator {
 public:
  Simulator(const std::vector<Program>& programs, const SimulateOptions& options)
      : programs_(programs), options_(options), ranks_(programs.size()) {
    if (options.nbytes < 0 || options.tile_bytes < 0 || options.slots < 1 || !options.cost) {
      throw UsageError(
          "simulate: expected nbytes >= 0, tile_bytes >= 0, slots >= 1 and a link cost, got "
          "nbytes " +
          std::to_string(options.nbytes) + ", tile_bytes " + std::to_string(options.tile_bytes) +
          ", slots " + std::to_string(options.slots));
    }
    const int64_t num_parts = programs.empty() ? 1 : programs[0].blocks_per_payload;
    block_bytes_ = (options.nbytes + num_parts - 1) / num_parts;
    tile_bytes_ = options.tile_bytes > 0 ? options.tile_bytes : block_bytes_;
    num_tiles_ = tile_bytes_ > 0 ? (block_bytes_ + tile_bytes_ - 1) / tile_bytes_ : 0;
    check_messages();
    simulation_.rank_time_s.resize(programs.size());
    simulation_.sent_bytes.resize(programs.size());
  }

  Simulation run() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) try_start(static_cast<int>(rank), 0);
    while (!agenda_.empty()) {
      const Appointment next = agenda_.top();
      agenda_.pop();
      continue_step(next.rank, next.time_s);
    }
    for (const Program& program : programs_) check_finished(program);
    for (double time_s : simulation_.rank_time_s) {
      simulation_.time_s = std::max(simulation_.time_s, time_s);
    }
    std::stable_sort(simulation_.events.begin(), simulation_.events.end(),
                     [](const Event& a, const Event& b) { return a.start_s < b.start_s; });
    return std::move(simulation_);
  }

 private:
  struct RankState {
    int64_t tile = 0;
    size_t step = 0;
    bool is_busy = false;
    bool is_sending = false;    // the transfer to dsts[num_sent] is in progress
    std::vector<int32_t> dsts;  // of the running step, nearest next rank first
    size_t num_sent = 0;
    double receiving_port_free_s = 0;
  };
  struct LinkState {
    int num_taken = 0;  // slots that are being written, full, or being read
    int num_full = 0;
  };
  using Link = std::tuple<bool, int32_t, int32_t>;  // is a multicast ring, writer, reader
  struct Appointment {
    double time_s;
    int64_t order;  // breaks ties: the earliest created comes first
    int rank;
    bool operator<(const Appointment& other) const {
      return std::tie(other.time_s, other.order) < std::tie(time_s, order);
    }
  };

  const Step& running(int rank) const { return programs_[rank].steps[ranks_[rank].step]; }
  LinkState& link_from(int rank, const Step& step, int32_t peer) {
    return links_[{step.has(kMulticastSrc), peer, rank}];
  }
  LinkState& link_to(int rank, const Step& step, int32_t peer) {
    return links_[{step.has(kMulticastDst), rank, peer}];
  }
  std::vector<int32_t> ranks_in(int rank, uint64_t mask) const {
    std::vector<int32_t> members;
    const std::vector<int32_t>& peers = programs_[rank].peers;
    for (size_t i = 0; i < peers.size(); ++i) {
      if ((mask >> i & 1) != 0) members.push_back(peers[i]);
    }
    return members;
  }

  int64_t bytes_of(int rank, const Step& step) const {
    const int64_t tile = ranks_[rank].tile;
    const int64_t in_tile = std::min(tile_bytes_, block_bytes_ - tile * tile_bytes_);
    const int32_t pieces = programs_[rank].num_chunks / programs_[rank].num_blocks;
    const auto start = [&](int32_t chunk) {
      return chunk / pieces * in_tile + chunk_start(in_tile, pieces, chunk % pieces);
    };
    return start(step.chunks().end()) - start(step.first_chunk);
  }

  void wake_at(int rank, double time_s) { agenda_.push({time_s, num_wakeups_++, rank}); }

  void record(Event::Kind kind, int rank, int peer, double start_s, double end_s) {
    const RankState& state = ranks_[rank];
    const Step& step = running(rank);
    simulation_.events.push_back({kind, rank, peer, static_cast<int32_t>(state.step),
                                  static_cast<int32_t>(state.tile), step.chunks(),
                                  bytes_of(rank, step), start_s, end_s});
  }

  /// Starts the rank's next step, if there is one and nothing is missing.
  void try_start(int rank, double now_s) {
    RankState& state = ranks_[rank];
    if (state.is_busy || state.tile == num_tiles_ || programs_[rank].steps.empty()) return;
    const Step& step = running(rank);
    const std::vector<int32_t> srcs = ranks_in(rank, step.src_peers);
    std::vector<int32_t> dsts = ranks_in(rank, step.dst_peers);
    for (int32_t src : srcs) {
      if (link_from(rank, step, src).num_full == 0) return;
    }
    for (int32_t dst : dsts) {
      if (link_to(rank, step, dst).num_taken >= options_.slots) return;
    }

    const int num_ranks = programs_[rank].num_ranks;
    const auto distance = [&](int32_t dst) { return (dst - rank + num_ranks) % num_ranks; };
    std::sort(dsts.begin(), dsts.end(),
              [&](int32_t a, int32_t b) { return distance(a) < distance(b); });
    for (int32_t dst : dsts) ++link_to(rank, step, dst).num_taken;
    state.is_busy = true;
    state.dsts = std::move(dsts);
    state.num_sent = 0;

    double combine_s = 0;  // the first operand costs nothing: local chunks, or the first source
    for (size_t i = step.has(kReadLocal) ? 0 : 1; i < srcs.size(); ++i) {
      combine_s += options_.cost(srcs[i], rank).gamma_s_per_byte * bytes_of(rank, step);
    }
    if (combine_s > 0) record(Event::Kind::kReduce, rank, -1, now_s, now_s + combine_s);
    wake_at(rank, now_s + combine_s);
  }

  /// Called when the operands are combined or a transfer has arrived: starts the next transfer, or
  /// ends the step.
  void continue_step(int rank, double now_s) {
    RankState& state = ranks_[rank];
    const Step& step = running(rank);
    if (state.is_sending) {
      const int32_t dst = state.dsts[state.num_sent++];
      state.is_sending = false;
      ++link_to(rank, step, dst).num_full;
      try_start(dst, now_s);
    }
    if (state.num_sent == state.dsts.size()) return finish_step(rank, now_s);

    const int32_t dst = state.dsts[state.num_sent];
    const LinkCost cost = options_.cost(rank, dst);
    const int64_t nbytes = bytes_of(rank, step);
    double& port_free_s = ranks_[dst].receiving_port_free_s;
    const double start_s = std::max(now_s, port_free_s);
    port_free_s = start_s + cost.alpha_s + cost.beta_s_per_byte * static_cast<double>(nbytes);
    record(Event::Kind::kTransfer, rank, dst, start_s, port_free_s);
    simulation_.sent_bytes[rank] += nbytes;
    state.is_sending = true;
    wake_at(rank, port_free_s);
  }

  void finish_step(int rank, double now_s) {
    RankState& state = ranks_[rank];
    const Step& step = running(rank);
    state.is_busy = false;
    simulation_.rank_time_s[rank] = now_s;
    if (++state.step == programs_[rank].steps.size()) {
      state.step = 0;
      ++state.tile;
    }
    for (int32_t src : ranks_in(rank, step.src_peers)) {
      LinkState& link = link_from(rank, step, src);
      --link.num_taken;
      --link.num_full;
      try_start(src, now_s);
    }
    try_start(rank, now_s);
  }

  void check_messages() const {
    int64_t num_steps = 1;
    for (const Program& program : programs_) num_steps += std::ssize(program.steps);
    if (num_tiles_ <= kMaxMessages / num_steps) return;
    throw UsageError("simulate: " + std::to_string(num_tiles_) + " tiles of " +
                     std::to_string(num_steps) + " steps are more than " +
                     std::to_string(kMaxMessages) + " messages: pass a larger tile_bytes");
  }

  void check_finished(const Program& program) const {
    const RankState& state = ranks_[program.rank];
    if (state.tile == num_tiles_ || program.steps.empty()) return;
    throw UsageError(
        "simulate: with slots=" + std::to_string(options_.slots) +
        " the ranks wait for each other for ever; rank " + std::to_string(program.rank) +
        " in step " + std::to_string(state.step) + " (" +
        explain_step(program, program.steps[state.step]) +
        "): verify() reports the cause, min_safe_slots() a sufficient number of slots");
  }

  const std::vector<Program>& programs_;
  const SimulateOptions& options_;
  int64_t block_bytes_ = 0;
  int64_t tile_bytes_ = 0;  // of every block
  int64_t num_tiles_ = 0;
  int64_t num_wakeups_ = 0;
  std::vector<RankState> ranks_;
  std::map<Link, LinkState> links_;
  std::priority_queue<Appointment> agenda_;
  Simulation simulation_;
};

}  // namespace

Simulation simulate(const std::vector<Program>& programs, const SimulateOptions& options) {
  return Simulator(programs, options).run();
}

}  // namespace pycoll
