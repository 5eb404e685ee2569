// Bytes that a rank sends, in units of the message: formulas from the literature, not derived from
// the moves. In the formulas of trees, `place` counts ranks from the root.
#pragma once

namespace pycoll::sent {

double least_for_all_reduce(int n, int rank, int root);
double everything_to_all(int n, int rank, int root);
double reduce_broadcast(int n, int rank, int root);
double tree(int n, int rank, int root);
double ring_naive(int n, int rank, int root);
double star_all_reduce(int n, int rank, int root);

double others_blocks(int n, int rank, int root);
double block_to_root(int n, int rank, int root);
double binomial_gather(int n, int rank, int root);
double binomial_scatter(int n, int rank, int root);
double star_scatter(int n, int rank, int root);
double bruck_all_to_all(int n, int rank, int root);
double both_sides(int n, int rank, int root);

double binomial_broadcast(int n, int rank, int root);
double star_broadcast(int n, int rank, int root);
double scatter_all_gather(int n, int rank, int root);
double chain_broadcast(int n, int rank, int root);
double one_to_root(int n, int rank, int root);
double two_shot_reduce(int n, int rank, int root);
double reduce_scatter_gather(int n, int rank, int root);

double chain_scan(int n, int rank, int root);
double doubling_scan(int n, int rank, int root);
double all_pairs_scan(int n, int rank, int root);
double chain_exscan(int n, int rank, int root);
double doubling_exscan(int n, int rank, int root);
double all_pairs_exscan(int n, int rank, int root);

}  // namespace pycoll::sent
