#include "plan/estimate.h"

#include <algorithm>
#include <bit>
#include <deque>

#include "plan/plan.h"
#include "schedule/lower.h"

namespace pycoll {
namespace {

// Time to find, check and post one slot, on server cores of 2023.
constexpr double kSlotS = 40e-9;
constexpr double kSpareWork = 0.25;
// A rank that has to wait gives its core away, and later gets it back. If the message is there
// already, as those of one round are after its first, most of that is saved.
constexpr double kNoWait = 0.2;

/// Stands for a long message of many equal tiles: four of them show the steady state.
struct Sample {
  int64_t pieces;      // chunks of a block
  int64_t tile_bytes;  // of a block
  int64_t nbytes;
  int64_t num_tiles;
  double scale;

  Sample(const Program& program, int64_t message_nbytes, const HostLevel& hosts)
      : pieces(program.num_chunks / program.num_blocks),
        tile_bytes(static_cast<int64_t>(hosts.message_bytes()) * pieces /
                   std::max(program.max_range, 1)),
        nbytes(std::min(message_nbytes, 4 * tile_bytes * program.blocks_per_payload)),
        num_tiles(std::max<int64_t>(1, (nbytes + tile_bytes * program.blocks_per_payload - 1) /
                                           (tile_bytes * program.blocks_per_payload))),
        scale(nbytes == 0 ? 1.0 : static_cast<double>(message_nbytes) / nbytes) {}
};

/// Walks all programs together, and advances each rank as far as its sources have been written.
class Walk {
 public:
  Walk(const std::vector<Program>& programs, double chunk_nbytes, int64_t num_tiles,
       const LinkCost& cost, const HostLevel& hosts)
      : programs_(programs),
        chunk_nbytes_(chunk_nbytes),
        num_tiles_(num_tiles),
        num_together_(hosts.num_hosts > 1 ? kTilesTogether : 1),
        cost_(cost),
        hosts_(hosts),
        sent_s_(static_cast<size_t>(hosts.num_hosts)),
        received_s_(static_cast<size_t>(hosts.num_hosts)),
        n_(programs.size()),
        ranks_(n_),
        links_(n_ * n_),
        is_due_(n_, true) {
    for (size_t rank = 0; rank < n_; ++rank) {
      due_.push_back(rank);
      const std::vector<Step>& steps = programs[rank].steps;
      const auto num_steps = static_cast<int>(steps.size());
      StepEnds& ends = ends_.emplace_back(step_ends(steps.data(), num_steps));
      ends.num_first = num_steps_ahead(ends, hosts.num_hosts == 1, hosts.one_per_host());
    }
    while (!due_.empty()) {
      const size_t rank = due_.front();
      due_.pop_front();
      is_due_[rank] = false;
      advance(rank);
    }
  }

  double longest_s() const {
    double longest_s = 0;
    for (const RankState& rank : ranks_) longest_s = std::max(longest_s, rank.free_s);
    return longest_s;
  }
  double work_s() const { return work_s_; }

 private:
  struct RankState {
    int64_t tile = 0;
    int step = 0;
    bool is_ahead = false;  // the step is one of the next tiles
    bool is_over = false;
    double free_s = 0;

    /// Runs each step for `num_together` tiles before the next step, and the first steps of the
    /// next tiles before the last steps of these, as interpret_together does where no link lacks
    /// credits.
    void next(const StepEnds& ends, int num_steps, int64_t num_together, int64_t num_tiles) {
      const int64_t first = tile - tile % num_together;
      if (++tile < std::min(first + num_together, num_tiles)) return;
      tile = first;
      ++step;
      if (is_ahead && step == ends.num_first) {
        is_ahead = false;
        tile = first - num_together;
        step = ends.first_of_last;
      } else if (!is_ahead && step == ends.first_of_last && ends.num_first != 0 &&
                 first + num_together < num_tiles) {
        is_ahead = true;
        tile = first + num_together;
        step = 0;
      }
      if (is_ahead || step != num_steps) return;
      // The first steps of the next tiles are over.
      tile += num_together;
      step = ends.num_first;
      is_over = tile >= num_tiles;
    }
  };
  // Times from which messages can be read; a multicast message has an entry for every reader.
  struct Link {
    std::deque<double> messages[2];
  };

  std::deque<double>& messages(size_t src, size_t dst, bool multicast) {
    return links_[src * n_ + dst].messages[multicast ? 1 : 0];
  }

  template <class Visit>
  void for_each_peer(size_t rank, uint64_t mask, Visit&& visit) {
    for (; mask != 0; mask &= mask - 1) {
      visit(static_cast<size_t>(programs_[rank].peers[std::countr_zero(mask)]));
    }
  }

  void advance(size_t rank) {
    RankState& state = ranks_[rank];
    const std::vector<Step>& steps = programs_[rank].steps;
    while (!state.is_over && !steps.empty()) {
      const Step& step = steps[static_cast<size_t>(state.step)];
      bool ready = true;
      double start_s = state.free_s;
      for_each_peer(rank, step.src_peers, [&](size_t src) {
        const auto& queue = messages(src, rank, step.has(kMulticastSrc));
        if (queue.empty()) {
          ready = false;
        } else {
          // A message of another host is copied while it arrives.
          const double copy_s = hosts_.is_remote(src, rank) ? copy_s_of(step) : 0;
          start_s = std::max(start_s, queue.front() - copy_s);
        }
      });
      if (!ready) return;
      take(rank, step, start_s);
      state.next(ends_[rank], static_cast<int>(steps.size()), num_together_, num_tiles_);
    }
  }

  /// The time of a core for copying a message into the kernel, or out of it.
  double copy_s_of(const Step& step) const {
    return chunk_nbytes_ * step.num_chunks * hosts_.copy_s_per_byte;
  }

  void take(size_t rank, const Step& step, double start_s) {
    const double nbytes = chunk_nbytes_ * step.num_chunks;
    const int num_links = std::popcount(step.src_peers);
    const int num_srcs = num_links + (step.has(kReadLocal) ? 1 : 0);
    const int num_dsts = std::popcount(step.dst_peers);
    const int num_writes = step.has(kMulticastDst) ? std::min(num_dsts, 1) : num_dsts;
    int num_remote_srcs = 0;
    int num_remote_dsts = 0;
    for_each_peer(rank, step.src_peers,
                  [&](size_t peer) { num_remote_srcs += hosts_.is_remote(rank, peer) ? 1 : 0; });
    for_each_peer(rank, step.dst_peers,
                  [&](size_t peer) { num_remote_dsts += hosts_.is_remote(rank, peer) ? 1 : 0; });
    const int num_remote = num_remote_srcs + num_remote_dsts;
    // A proxy sends what is in a local buffer from there. (Not with ll, whose messages are short.)
    const bool sends_in_place = step.src_peers == 0 || step.has(kWriteLocal);
    const int num_copies = num_links + num_writes - (sends_in_place ? num_remote_dsts : 0);
    const double busy_s = num_remote * (hosts_.message_s + copy_s_of(step)) +
                          (num_links + num_writes) * kSlotS +
                          nbytes * (num_copies * cost_.beta_s_per_byte / 2 +
                                    std::max(0, num_srcs - 1) * cost_.gamma_s_per_byte);
    const double waits = start_s > ranks_[rank].free_s ? 1 : num_links > 0 ? kNoWait : 0;
    work_s_ += busy_s + waits * cost_.alpha_s;
    const double end_s = start_s + busy_s;
    ranks_[rank].free_s = end_s;
    for_each_peer(rank, step.src_peers,
                  [&](size_t src) { messages(src, rank, step.has(kMulticastSrc)).pop_front(); });
    for_each_peer(rank, step.dst_peers, [&](size_t dst) {
      const double there_s =
          hosts_.is_remote(rank, dst)
              ? std::max(end_s + hosts_.alpha_s, cross(rank, dst, end_s - copy_s_of(step), nbytes))
              : end_s + cost_.alpha_s;
      messages(rank, dst, step.has(kMulticastDst)).push_back(there_s);
      if (!is_due_[dst]) {
        is_due_[dst] = true;
        due_.push_back(dst);
      }
    });
  }

  /// The time at which a message has arrived whose sending to another host begins at `at_s`.
  double cross(size_t src, size_t dst, double at_s, double nbytes) {
    double& sent_s = sent_s_[static_cast<size_t>(hosts_.host_of[src])];
    double& received_s = received_s_[static_cast<size_t>(hosts_.host_of[dst])];
    const double on_wire_s = nbytes * hosts_.beta_s_per_byte;
    // The receiver's port is busy at the same time as the sender's.
    const double start_s = std::max({at_s, sent_s, received_s});
    sent_s = received_s = start_s + on_wire_s;
    return sent_s + hosts_.alpha_s;
  }

  const std::vector<Program>& programs_;
  const double chunk_nbytes_;
  const int64_t num_tiles_;
  const int64_t num_together_;
  const LinkCost& cost_;
  const HostLevel& hosts_;
  std::vector<double> sent_s_;  // by host: the time from which its port is free
  std::vector<double> received_s_;
  const size_t n_;
  std::vector<StepEnds> ends_;  // by rank: steps that change places
  std::vector<RankState> ranks_;
  std::vector<Link> links_;  // by writer, then reader
  std::vector<bool> is_due_;
  std::deque<size_t> due_;
  double work_s_ = 0;
};

/// Work outside the longest chain delays the next call, so it counts a little even with spare
/// cores.
double add_other_work(double longest_s, double work_s, int num_ranks, int num_cores) {
  return longest_s + (num_ranks > num_cores ? work_s / num_cores : kSpareWork * work_s / num_ranks);
}

}  // namespace

std::vector<Program> lower_for(const Schedule& schedule, int64_t nbytes, const HostLevel& hosts) {
  const bool multicast = hosts.num_hosts == 1;
  std::vector<Program> programs = lower(schedule, {.multicast = multicast});
  const Program& first = programs.front();
  const Sample sample(first, nbytes, hosts);
  if (nbytes <= sample.tile_bytes * first.blocks_per_payload) return programs;
  const bool join_blocks = first.max_range <= sample.pieces;
  const bool join_chunks = hosts.num_hosts == 1 || first.max_range == 1;
  if (join_blocks && join_chunks) return programs;
  return lower(schedule,
               {.multicast = multicast, .join_blocks = join_blocks, .join_chunks = join_chunks});
}

double estimate_s(const std::vector<Program>& programs, int64_t nbytes, const LinkCost& cost,
                  int num_cores, const HostLevel& hosts) {
  const Program& first = programs.front();
  const Sample sample(first, nbytes, hosts);
  const double chunk_nbytes = static_cast<double>(sample.nbytes) / first.blocks_per_payload /
                              static_cast<double>(sample.pieces * sample.num_tiles);
  const auto time_s = [&](int64_t num_tiles) {
    const Walk walk(programs, chunk_nbytes, num_tiles, cost, hosts);
    const int num_ranks = static_cast<int>(programs.size());
    return add_other_work(walk.longest_s(), walk.work_s(), num_ranks, num_cores);
  };
  const double sample_s = time_s(sample.num_tiles);
  if (sample.scale == 1.0 || hosts.num_hosts == 1) return sample_s * sample.scale;
  // Between hosts the first tiles take longer, since they fill the links.
  const int64_t half = sample.num_tiles / 2;
  return sample_s + (sample.scale - 1) * static_cast<double>(sample.num_tiles) *
                        (sample_s - time_s(half)) / static_cast<double>(half);
}

double estimate_direct_s(const std::vector<DirectWork>& work, double block_nbytes,
                         const LinkCost& cost, int num_cores) {
  double longest_s = 0;
  double work_s = 0;
  for (const DirectWork& rank : work) {
    const double busy_s =
        2 * cost.alpha_s + rank.num_accesses * kSlotS +
        block_nbytes * (rank.remote * cost.beta_s_per_byte + rank.combined * cost.gamma_s_per_byte);
    longest_s = std::max(longest_s, busy_s);
    work_s += busy_s;
  }
  return add_other_work(longest_s, work_s, static_cast<int>(work.size()), num_cores);
}

}  // namespace pycoll
