// Which algorithm and protocol: the candidates are simulated under the topology's costs.
#pragma once

#include <string>
#include <vector>

#include "schedule/collectives.h"
#include "topology/topology.h"

namespace pycoll {

struct Candidate {
  std::string algorithm;
  bool low_latency = false;  // protocol ll, else simple
  double predicted_s = 0;
};

/// All candidates for a message of `nbytes`, the fastest first.
std::vector<Candidate> rank_candidates(Collective collective, int64_t nbytes, int root,
                                       const Topology& topology);

}  // namespace pycoll
