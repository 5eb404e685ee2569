#include "algorithms/table/sent.h"

#include <algorithm>
#include <bit>

namespace pycoll::sent {
namespace {

int place_of(int n, int rank, int root) { return (rank - root + n) % n; }

/// Number of children in a binomial tree: `place` reaches place + 2^k for every 2^k > place.
double num_binomial_children(int n, int place) {
  const int powers_that_fit = std::bit_width(static_cast<unsigned>(n - place - 1));
  const int powers_up_to_place = std::bit_width(static_cast<unsigned>(place));
  return std::max(0, powers_that_fit - powers_up_to_place);
}

/// Size of the subtree of `place`: the places whose binary numbers begin like it, up to its last 1.
double num_below(int n, int place) {
  const int end = place == 0 ? n : place + (1 << std::countr_zero(static_cast<unsigned>(place)));
  return std::min(end, n) - place;
}

/// Number of ranks at distances 1, 2, 4, ... above `rank`.
double num_doublings(int n, int rank) {
  return std::bit_width(static_cast<unsigned>(n - 1 - rank));
}

double is_below_last(int n, int rank) { return rank < n - 1 ? 1 : 0; }

}  // namespace

double least_for_all_reduce(int n, int, int) { return 2.0 * (n - 1) / n; }
double everything_to_all(int n, int, int) { return n - 1; }

double reduce_broadcast(int n, int rank, int) {
  return (rank != 0 ? 1 : 0) + num_binomial_children(n, rank);
}

/// In one tree a rank sends its half up and to two children below; in the other it is a leaf and
/// sends only up: 4 halves. A root has no parent; the last inner node of an even number of ranks
/// has one child; one rank of an odd number is a leaf in both.
double tree(int n, int rank, int) {
  if (n == 1) return 0;
  const int root = ((n - 1) / 2) | 1;
  double halves = 4;
  if (rank == root || rank == (root + 1) % n) halves -= 1;
  if (n % 2 == 0 && (rank == 0 || rank == n - 1)) halves -= 1;
  if (n % 2 == 1 && rank == 0) halves -= 2;
  return halves / 2;
}

double ring_naive(int n, int rank, int) {
  if (n == 1) return 0;
  return (rank != n - 1 ? 1 : 0) + (rank != n - 2 ? 1 : 0);
}

double star_all_reduce(int n, int rank, int) { return rank == 0 ? n - 1 : 1; }

double others_blocks(int n, int, int) { return (n - 1.0) / n; }
double block_to_root(int n, int rank, int root) { return rank == root ? 0 : 1.0 / n; }

double binomial_gather(int n, int rank, int root) {
  return rank == root ? 0 : num_below(n, place_of(n, rank, root)) / n;
}

double binomial_scatter(int n, int rank, int root) {
  return (num_below(n, place_of(n, rank, root)) - 1) / n;
}

double star_scatter(int n, int rank, int root) { return rank == root ? (n - 1.0) / n : 0; }

/// A block for the rank `way` places further travels once for each 1 in the binary number of `way`.
/// By symmetry each rank makes as many of these hops as its own blocks need.
double bruck_all_to_all(int n, int, int) {
  int num_hops = 0;
  for (int way = 1; way < n; ++way) num_hops += std::popcount(static_cast<unsigned>(way));
  return static_cast<double>(num_hops) / n;
}

double both_sides(int n, int, int) { return n > 1 ? 1 : 0; }

double binomial_broadcast(int n, int rank, int root) {
  return num_binomial_children(n, place_of(n, rank, root));
}

double star_broadcast(int n, int rank, int root) { return rank == root ? n - 1 : 0; }

/// The scatter to the subtree, then all chunks that the next rank on the ring does not have yet.
double scatter_all_gather(int n, int rank, int root) {
  const double next_has = num_below(n, place_of(n, rank + 1, root));
  return binomial_scatter(n, rank, root) + (n - next_has) / n;
}

double chain_broadcast(int n, int rank, int root) {
  return is_below_last(n, place_of(n, rank, root));
}

double one_to_root(int, int rank, int root) { return rank == root ? 0 : 1; }

double two_shot_reduce(int n, int rank, int root) { return (rank == root ? n - 1.0 : n) / n; }

double reduce_scatter_gather(int n, int rank, int root) {
  return (n - 1.0) / n + binomial_gather(n, rank, root);
}

double chain_scan(int n, int rank, int) { return is_below_last(n, rank); }
double doubling_scan(int n, int rank, int) { return num_doublings(n, rank); }
double all_pairs_scan(int n, int rank, int) { return n - 1 - rank; }

// In an exscan each rank first sends its own value to the next rank; the rest excludes rank 0.

double chain_exscan(int n, int rank, int) { return is_below_last(n, rank) * (rank == 0 ? 1 : 2); }

double doubling_exscan(int n, int rank, int) {
  return is_below_last(n, rank) + (rank == 0 ? 0 : num_doublings(n, rank));
}

double all_pairs_exscan(int n, int rank, int) {
  return is_below_last(n, rank) + (rank == 0 ? 0 : n - 1 - rank);
}

}  // namespace pycoll::sent
