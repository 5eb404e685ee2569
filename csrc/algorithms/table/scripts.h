// Scripts of algorithms for very many ranks, made without the moves: a ring of 10,240 ranks has 200
// million of them. They equal the scripts of the lowered moves; tests compare them for small n.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/collectives.h"
#include "schedule/script.h"

namespace pycoll {

struct ScriptRequest {
  Collective collective = Collective::kAllReduce;
  std::string algorithm;  // a name of the registry, or "hierarchical"
  int32_t num_ranks = 1;
  int32_t root = 0;
  // For "hierarchical", ascending: ranks per host, per rack, ... Each divides the next one.
  std::vector<int32_t> groups;
  std::string between = "ring";  // the algorithm between the last groups
};

/// One script per rank. "ring" and "hierarchical" (all_reduce, reduce_scatter, all_gather) are
/// written as scripts; all others are lowered from their moves.
/// Raises UsageError when groups do not divide the ranks, or when there would be too many moves.
std::vector<Script> make_scripts(const ScriptRequest& request);

}  // namespace pycoll
