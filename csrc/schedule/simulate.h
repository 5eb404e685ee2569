// Discrete-event simulation of lowered programs under alpha, beta and gamma per link.
//
// Model: a message of b bytes on link (s, d) takes alpha + b*beta; during that time it holds s's
// sending port and d's receiving port (each rank has one of each; a multicast slot holds the
// sender's port once per reader). Combining costs gamma per byte of each further source.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "schedule/cut.h"
#include "schedule/schedule.h"
#include "schedule/step.h"

namespace pycoll {

struct LinkCost {
  double alpha_s = 0;           // latency, seconds
  double beta_s_per_byte = 0;   // inverse bandwidth
  double gamma_s_per_byte = 0;  // inverse reduction rate at the receiver
};

struct SimulateOptions {
  int64_t nbytes = 0;      // of the message; its blocks are rounded up to whole bytes
  int64_t tile_bytes = 0;  // of every block that one run of the program moves; 0: all at once
  int slots = 8;
  std::function<LinkCost(int src, int dst)> cost;
};

struct Event {
  enum class Kind : uint8_t { kTransfer, kReduce };
  Kind kind;
  int32_t rank;  // kTransfer: the sender; kReduce: the rank that combines
  int32_t peer;  // kTransfer: the receiver; kReduce: -1
  int32_t step;  // index into the rank's program
  int32_t tile;
  ChunkRange chunks;
  int64_t nbytes;
  double start_s;
  double end_s;
};

struct Simulation {
  double time_s = 0;                // until the last rank is done
  std::vector<double> rank_time_s;  // until each rank is done
  std::vector<int64_t> sent_bytes;  // per rank; a multicast slot counts once per reader
  std::vector<Event> events;        // ascending start_s
};

Simulation simulate(const std::vector<Program>& programs, const SimulateOptions& options);

}  // namespace pycoll
