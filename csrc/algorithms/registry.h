// The built-in algorithms: one row, one generator and one file each.
#pragma once

#include <span>
#include <string_view>

#include "schedule/schedule.h"

namespace pycoll {

struct AlgorithmInfo {
  Collective collective;
  std::string_view name;
  std::string_view cost;    // alpha-beta-gamma time of n ranks and N bytes
  std::string_view source;  // where it was published
  Schedule (*generate)(int num_ranks, int root);
  // Bytes that `rank` sends, in units of the message, as the literature's closed form: written
  // independently of the moves, so that a test compares the two.
  double (*sent_fraction)(int num_ranks, int rank, int root);
};

std::span<const AlgorithmInfo> algorithms();
/// Raises UsageError listing the collective's algorithms.
const AlgorithmInfo& find_algorithm(Collective collective, std::string_view name);

// One per file.
Schedule ring_all_reduce(int num_ranks, int root);
Schedule halving_doubling_all_reduce(int num_ranks, int root);
Schedule tree_all_reduce(int num_ranks, int root);
Schedule one_shot_all_reduce(int num_ranks, int root);
Schedule two_shot_all_reduce(int num_ranks, int root);
Schedule reduce_broadcast_all_reduce(int num_ranks, int root);
Schedule all_to_all_all_reduce(int num_ranks, int root);
Schedule ring_naive_all_reduce(int num_ranks, int root);
Schedule star_all_reduce(int num_ranks, int root);
Schedule binomial_broadcast(int num_ranks, int root);
Schedule star_broadcast(int num_ranks, int root);

}  // namespace pycoll
