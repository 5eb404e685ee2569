// The built-in algorithms: one row and one generator each.
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
  // Bytes that `rank` sends, in units of the message, which is blocks_per_payload blocks
  // (collectives.h); a slot with several readers counts once per reader. This is the closed form of
  // the literature, independent of the moves, so that a test can compare the two.
  double (*sent_fraction)(int num_ranks, int rank, int root);
};

std::span<const AlgorithmInfo> algorithms();
/// Raises UsageError listing the collective's algorithms.
const AlgorithmInfo& find_algorithm(Collective collective, std::string_view name);

// Generators, named <algorithm>_<collective>; one file per idea.
Schedule ring_all_reduce(int num_ranks, int root);
Schedule halving_doubling_all_reduce(int num_ranks, int root);
Schedule tree_all_reduce(int num_ranks, int root);
Schedule one_shot_all_reduce(int num_ranks, int root);
Schedule two_shot_all_reduce(int num_ranks, int root);
Schedule reduce_broadcast_all_reduce(int num_ranks, int root);
Schedule all_to_all_all_reduce(int num_ranks, int root);
Schedule ring_naive_all_reduce(int num_ranks, int root);
Schedule star_all_reduce(int num_ranks, int root);
Schedule ring_reduce_scatter(int num_ranks, int root);
Schedule halving_reduce_scatter(int num_ranks, int root);
Schedule all_pairs_reduce_scatter(int num_ranks, int root);
Schedule ring_all_gather(int num_ranks, int root);
Schedule recursive_doubling_all_gather(int num_ranks, int root);
Schedule bruck_all_gather(int num_ranks, int root);
Schedule all_pairs_all_gather(int num_ranks, int root);
Schedule binomial_broadcast(int num_ranks, int root);
Schedule star_broadcast(int num_ranks, int root);
Schedule scatter_all_gather_broadcast(int num_ranks, int root);
Schedule chain_broadcast(int num_ranks, int root);
Schedule binomial_reduce(int num_ranks, int root);
Schedule star_reduce(int num_ranks, int root);
Schedule chain_reduce(int num_ranks, int root);
Schedule two_shot_reduce(int num_ranks, int root);
Schedule reduce_scatter_gather_reduce(int num_ranks, int root);
Schedule binomial_gather(int num_ranks, int root);
Schedule star_gather(int num_ranks, int root);
Schedule binomial_scatter(int num_ranks, int root);
Schedule star_scatter(int num_ranks, int root);
Schedule pairwise_all_to_all(int num_ranks, int root);
Schedule all_pairs_all_to_all(int num_ranks, int root);
Schedule bruck_all_to_all(int num_ranks, int root);
Schedule chain_scan(int num_ranks, int root);
Schedule recursive_doubling_scan(int num_ranks, int root);
Schedule all_pairs_scan(int num_ranks, int root);
Schedule chain_exscan(int num_ranks, int root);
Schedule recursive_doubling_exscan(int num_ranks, int root);
Schedule all_pairs_exscan(int num_ranks, int root);
Schedule direct_neighbor_exchange(int num_ranks, int root);

}  // namespace pycoll
