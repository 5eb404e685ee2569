#include "sim/flow_simulation.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "sim/fair_share.h"
#include "sim/flow_timeline.h"

namespace pycoll {
namespace {

/// Events in order of time: a heap with four children per node, which fits cache lines better than
/// two children do.
class Agenda {
 public:
  struct Event {
    double time_s;
    uint32_t idx;  // of an actor or a channel
    uint32_t tag;  // 2 bits of kind, then the version of an actor's transfer
  };

  bool empty() const { return heap_.empty(); }
  const Event& top() const { return heap_.front(); }

  void push(const Event& event) {
    size_t at = heap_.size();
    heap_.push_back(event);
    while (at > 0) {
      const size_t parent = (at - 1) / 4;
      if (heap_[parent].time_s <= event.time_s) break;
      heap_[at] = heap_[parent];
      at = parent;
    }
    heap_[at] = event;
  }

  void pop() {
    const Event last = heap_.back();
    heap_.pop_back();
    const size_t size = heap_.size();
    if (size == 0) return;
    size_t at = 0;
    for (;;) {
      const size_t first = 4 * at + 1;
      if (first >= size) break;
      size_t least = first;
      for (size_t child = first + 1; child < std::min(first + 4, size); ++child) {
        if (heap_[child].time_s < heap_[least].time_s) least = child;
      }
      if (heap_[least].time_s >= last.time_s) break;
      heap_[at] = heap_[least];
      at = least;
    }
    heap_[at] = last;
  }

 private:
  std::vector<Event> heap_;
};

enum Kind : uint32_t {
  kEnter,   // an actor begins
  kLeave,   // an actor's transfer enters shared links
  kGone,    // an actor's transfer has left the links, or its step without transfers is done
  kArrive,  // a channel has one more full slot
};

class FlowSimulator {
 public:
  FlowSimulator(const FlowSystem& system, const FlowOptions& options)
      : system_(system),
        options_(options),
        actors_(system.actors.size()),
        channels_(system.channels.size()),
        shares_(system, options.num_bins > 0
                            ? FairShare::Moved([this](int32_t channel, double from_s, double to_s,
                                                      double nbytes) {
                                recorder_->add(channel, from_s, to_s, nbytes);
                              })
                            : FairShare::Moved()) {
    if (!(options.nbytes >= 0) || !(options.tile_fraction > 0) || options.slots < 1 ||
        options.num_bins < 0) {
      throw UsageError("simulate: expected nbytes >= 0, tiles above 0 and slots >= 1");
    }
    num_tiles_ =
        options.nbytes > 0
            ? std::max<int64_t>(1, std::llround(std::ceil(1 / options.tile_fraction - 1e-9)))
            : 0;
    if (num_tiles_ == 1)
      last_tile_ = 1;
    else
      last_tile_ = 1 - static_cast<double>(num_tiles_ - 1) * options.tile_fraction;
    num_messages_ = system.num_messages() * num_tiles_;
    if (num_messages_ > options.max_messages) {
      throw UsageError(
          "simulate: " + std::to_string(num_messages_) +
          " messages are more than max_messages = " + std::to_string(options.max_messages) +
          ": use fewer tiles or an algorithm with fewer rounds, or raise max_messages");
    }
    if (options.num_bins > 0) {
      recorder_ = std::make_unique<TimelineRecorder>(system, options.num_bins);
    }
  }

  FlowResult run() {
    for (size_t a = 0; a < actors_.size(); ++a) {
      meet(system_.actors[a].cost.start_s, static_cast<uint32_t>(a), kEnter);
    }
    while (!agenda_.empty()) {
      const double now_s = agenda_.top().time_s;
      while (!agenda_.empty() && agenda_.top().time_s == now_s) {
        const Agenda::Event event = agenda_.top();
        agenda_.pop();
        handle(event);
      }
      report_now_and_then();
      if (!shares_.is_dirty()) continue;
      shares_.solve(now_s, [&](int32_t channel, double end_s) {
        const auto a = static_cast<uint32_t>(system_.channels[static_cast<size_t>(channel)].src);
        meet(end_s, a, kGone, ++actors_[a].version);
      });
    }
    FlowResult result;
    for (size_t a = 0; a < actors_.size(); ++a) check_finished(a);
    for (int32_t actor : system_.actor_of_rank) {
      result.rank_time_s.push_back(actors_[static_cast<size_t>(actor)].done_s);
      result.time_s = std::max(result.time_s, result.rank_time_s.back());
    }
    result.num_messages = num_sent_;
    result.num_shares = shares_.num_solved();
    if (recorder_ != nullptr) result.timeline = recorder_->take();
    return result;
  }

 private:
  struct ActorState {
    int64_t tile = 0;
    int64_t times = 0;  // completed runs of the current loop
    int32_t loop = 0;
    int32_t step = 0;  // in the loop
    int32_t num_sent = 0;
    uint32_t version = 0;
    bool has_entered = false;
    bool is_busy = false;
    bool is_sending = false;
    bool is_shared = false;  // the transfer is on shared links
    double left_s = 0;       // time at which the transfer left
    double done_s = 0;
  };
  struct ChannelState {
    int32_t num_taken = 0;
    int32_t num_full = 0;
    uint64_t num_messages = 0;
  };

  static constexpr uint32_t kVersions = (1u << 30) - 1;

  void meet(double time_s, uint32_t idx, Kind kind, uint32_t version = 0) {
    agenda_.push({time_s, idx, kind | (version & kVersions) << 2});
  }

  const FlowStep& running(const ActorState& state, size_t a) const {
    const ScriptLoop& loop = system_.loops_of(system_.actors[a])[static_cast<size_t>(state.loop)];
    return system_.steps[static_cast<size_t>(loop.first_step + state.step)];
  }
  double bytes_of(const ActorState& state, const FlowStep& step) const {
    const double tile = state.tile == num_tiles_ - 1 ? last_tile_ : options_.tile_fraction;
    return options_.nbytes * tile * step.fraction;
  }

  void report_now_and_then() {
    const int64_t work = num_sent_ + shares_.num_shared();
    if (work < next_report_ || !options_.progress) return;
    constexpr int64_t kReportEvery = 1 << 18;
    next_report_ = work + kReportEvery;
    options_.progress(static_cast<double>(num_sent_) / static_cast<double>(num_messages_));
  }

  void handle(const Agenda::Event& event) {
    const double now_s = event.time_s;
    const auto idx = static_cast<size_t>(event.idx);
    switch (static_cast<Kind>(event.tag & 3)) {
      case kEnter:
        actors_[idx].has_entered = true;
        return try_start(idx, now_s);
      case kLeave: {
        ActorState& state = actors_[idx];
        const FlowStep& step = running(state, idx);
        state.is_shared = true;
        return shares_.start(system_.dsts(step)[static_cast<size_t>(state.num_sent)], now_s,
                             bytes_of(state, step));
      }
      case kGone:
        if ((actors_[idx].version & kVersions) != event.tag >> 2) return;  // its end has changed
        return continue_step(idx, now_s);
      case kArrive:
        return arrive(event.idx, now_s);
    }
  }

  void arrive(uint32_t channel, double now_s) {
    ++channels_[channel].num_full;
    try_start(static_cast<size_t>(system_.channels[channel].dst), now_s);
  }

  /// Starts the actor's next step, if there is one and nothing is missing.
  void try_start(size_t a, double now_s) {
    ActorState& state = actors_[a];
    if (state.is_busy || !state.has_entered || state.tile >= num_tiles_) return;
    if (system_.actors[a].num_loops == 0) return;
    const FlowStep& step = running(state, a);
    for (int32_t src : system_.srcs(step)) {
      if (channels_[static_cast<size_t>(src)].num_full == 0) return;
    }
    for (int32_t dst : system_.dsts(step)) {
      if (channels_[static_cast<size_t>(dst)].num_taken >= options_.slots) return;
    }
    for (int32_t dst : system_.dsts(step)) ++channels_[static_cast<size_t>(dst)].num_taken;
    state.is_busy = true;
    state.num_sent = 0;
    const double combine_s =
        system_.actors[a].cost.gamma_s_per_byte * step.num_combined * bytes_of(state, step);
    if (step.num_dsts > 0) return send(a, now_s + combine_s);
    meet(now_s + combine_s, static_cast<uint32_t>(a), kGone, ++state.version);
  }

  /// Begins the next transfer of the step, at once or when its operands are combined.
  void send(size_t a, double from_s) {
    ActorState& state = actors_[a];
    const FlowStep& step = running(state, a);
    const int32_t c = system_.dsts(step)[static_cast<size_t>(state.num_sent)];
    const FlowChannel& channel = system_.channels[static_cast<size_t>(c)];
    state.is_sending = true;
    double leaves_s = from_s + system_.actors[a].cost.overhead_s;
    if (options_.jitter.message_s > 0) {
      leaves_s += Jitter::exponential(options_.jitter.seed, static_cast<uint64_t>(c),
                                      channels_[static_cast<size_t>(c)].num_messages++,
                                      options_.jitter.message_s);
    }
    state.left_s = leaves_s;
    if (channel.num_hops > 0) return meet(leaves_s, static_cast<uint32_t>(a), kLeave);
    const double time_s = bytes_of(state, step) / channel.solo_bytes_per_s;
    meet(leaves_s + time_s, static_cast<uint32_t>(a), kGone, ++state.version);
  }

  /// Continues when the operands of a step without destinations are combined, or a transfer is
  /// over.
  void continue_step(size_t a, double now_s) {
    ActorState& state = actors_[a];
    const FlowStep& step = running(state, a);
    if (state.is_sending) {
      const int32_t c = system_.dsts(step)[static_cast<size_t>(state.num_sent++)];
      const FlowChannel& channel = system_.channels[static_cast<size_t>(c)];
      state.is_sending = false;
      if (state.is_shared) {
        state.is_shared = false;
        shares_.finish(c, now_s);
      } else if (recorder_ != nullptr) {
        recorder_->add(c, state.left_s, now_s, bytes_of(state, step));
      }
      ++num_sent_;
      if (channel.latency_s > 0) {
        meet(now_s + channel.latency_s, static_cast<uint32_t>(c), kArrive);
      } else {
        arrive(static_cast<uint32_t>(c), now_s);
      }
    }
    if (state.num_sent < step.num_dsts) return send(a, now_s);
    finish_step(a, step, now_s);
  }

  void finish_step(size_t a, const FlowStep& step, double now_s) {
    ActorState& state = actors_[a];
    const std::span<const ScriptLoop> loops = system_.loops_of(system_.actors[a]);
    state.is_busy = false;
    state.done_s = now_s;
    const ScriptLoop& loop = loops[static_cast<size_t>(state.loop)];
    if (++state.step == loop.num_steps) {
      state.step = 0;
      if (++state.times == loop.count) {
        state.times = 0;
        if (static_cast<size_t>(++state.loop) == loops.size()) {
          state.loop = 0;
          ++state.tile;
        }
      }
    }
    for (int32_t src : system_.srcs(step)) {
      ChannelState& channel = channels_[static_cast<size_t>(src)];
      --channel.num_full;
      // Only a sender that waited for this slot can start now.
      if (channel.num_taken-- == options_.slots) {
        try_start(static_cast<size_t>(system_.channels[static_cast<size_t>(src)].src), now_s);
      }
    }
    try_start(a, now_s);
  }

  void check_finished(size_t a) const {
    const ActorState& state = actors_[a];
    if (state.tile >= num_tiles_ || system_.actors[a].num_loops == 0) return;
    const auto rank = std::find(system_.actor_of_rank.begin(), system_.actor_of_rank.end(),
                                static_cast<int32_t>(a)) -
                      system_.actor_of_rank.begin();
    throw UsageError("simulate: with slots=" + std::to_string(options_.slots) +
                     " the ranks wait for each other for ever; rank " + std::to_string(rank) +
                     " in step " + std::to_string(state.step) + " of part " +
                     std::to_string(state.loop) + " of its script: more slots may help");
  }

  const FlowSystem& system_;
  const FlowOptions& options_;
  int64_t num_tiles_ = 0;
  double last_tile_ = 1;  // size of the last tile, as a part of the message
  int64_t num_messages_ = 0;
  int64_t num_sent_ = 0;
  int64_t next_report_ = 0;
  std::vector<ActorState> actors_;
  std::vector<ChannelState> channels_;
  std::unique_ptr<TimelineRecorder> recorder_;
  FairShare shares_;
  Agenda agenda_;
};

}  // namespace

FlowResult simulate_flows(const FlowSystem& system, const FlowOptions& options) {
  return FlowSimulator(system, options).run();
}

}  // namespace pycoll
