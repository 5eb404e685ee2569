// Scripts of algorithms for very many ranks, without the moves: a ring of 10,240 ranks has
// 200 million of them. Equal to what lowering the moves gives; tests compare them for small n.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/collectives.h"
#include "schedule/script.h"

namespace pycoll {

struct ScriptRequest {
  Collective collective = Collective::kAllReduce;
  std::string algorithm;  // of the registry, or "hierarchical"
  int32_t num_ranks = 1;
  int32_t root = 0;
  // Of "hierarchical": ranks per host, or ascending: per host, per rack, ... Each divides the next.
  std::vector<int32_t> groups;
  std::string between = "ring";  // the algorithm of those who are left, between the last groups
};

/// One script per rank. "ring" and "hierarchical" (all_reduce, reduce_scatter, all_gather) are
/// written as scripts, all others are lowered from their moves.
/// Raises UsageError when groups do not divide the ranks, or the moves would be too many.
std::vector<Script> make_scripts(const ScriptRequest& request);

}  // namespace pycoll
