// Discrete-event simulation of scripts whose messages share links.
//
// Model: a rank executes one step at a time: it waits for its sources and for free slots, combines
// (gamma per byte of every operand after the first), and makes one transfer after another. A
// transfer costs its rank an overhead, then uses the links of its route with the max-min fair share
// of their bandwidth, then arrives a latency later; the rank is free once the transfer has left.
// Freed slots are seen at once. Without shared links a message takes alpha + b beta, with alpha =
// overhead + latency: this is simulate.h's model without the queue at the receiving port.
// Source: LogGP, A. Alexandrov et al., SPAA 1995, for overhead and latency; fair_share.h for links.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "sim/flow_system.h"
#include "sim/jitter.h"

namespace pycoll {

struct FlowOptions {
  double nbytes = 0;         // of the message
  double tile_fraction = 1;  // part of the message that one run of the scripts moves
  int slots = 8;
  Jitter jitter;
  int num_bins = 0;  // of the timeline; 0: none
  int64_t max_messages = int64_t{1} << 40;
  std::function<void(double done)> progress;  // called now and then with the completed part
};

/// Bytes over the links of each level, as a function of time.
struct FlowTimeline {
  double bin_s = 0;
  std::vector<std::vector<double>> level_nbytes;  // [level][bin]; a message counts on each link
};

struct FlowResult {
  double time_s = 0;                // from the first start until the last rank is done
  std::vector<double> rank_time_s;  // until each rank is done
  int64_t num_messages = 0;         // simulated messages, of `num_actors` actors
  int64_t num_shares = 0;           // number of times that shares were recomputed
  FlowTimeline timeline;
};

/// Raises UsageError for invalid options, when more than max_messages would have to be simulated,
/// or when the ranks wait for each other for ever with so few slots.
FlowResult simulate_flows(const FlowSystem& system, const FlowOptions& options);

}  // namespace pycoll
