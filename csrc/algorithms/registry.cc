#include "algorithms/registry.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/error.h"

namespace pycoll {
namespace {

// What a rank sends, in units of the message: formulas from the literature, not from the moves.

double least_possible(int n, int, int) { return 2.0 * (n - 1) / n; }
double everything_to_all(int n, int, int) { return n - 1; }

/// The rank at `place` from the root of a binomial tree reaches place + 2^k for every 2^k > place.
double num_binomial_children(int n, int place) {
  const int powers_that_fit = std::bit_width(static_cast<unsigned>(n - place - 1));
  const int powers_up_to_place = std::bit_width(static_cast<unsigned>(place));
  return std::max(0, powers_that_fit - powers_up_to_place);
}

double reduce_broadcast_sends(int n, int rank, int) {
  return (rank != 0 ? 1 : 0) + num_binomial_children(n, rank);
}

double binomial_sends(int n, int rank, int root) {
  return num_binomial_children(n, (rank - root + n) % n);
}

/// In one tree a rank sends its half up and down to two children, in the other it is a leaf and
/// sends only up: 4 halves. A root has no parent; the last inner node of an even number of ranks
/// has one child; one rank of an odd number is a leaf twice.
double tree_sends(int n, int rank, int) {
  if (n == 1) return 0;
  const int root = ((n - 1) / 2) | 1;
  double halves = 4;
  if (rank == root || rank == (root + 1) % n) halves -= 1;
  if (n % 2 == 0 && (rank == 0 || rank == n - 1)) halves -= 1;
  if (n % 2 == 1 && rank == 0) halves -= 2;
  return halves / 2;
}

double ring_naive_sends(int n, int rank, int) {
  if (n == 1) return 0;
  return (rank != n - 1 ? 1 : 0) + (rank != n - 2 ? 1 : 0);
}

double star_sends(int n, int rank, int) { return rank == 0 ? n - 1 : 1; }
double star_broadcast_sends(int n, int rank, int root) { return rank == root ? n - 1 : 0; }

constexpr AlgorithmInfo kAlgorithms[] = {
    {Collective::kAllReduce, "ring", "2(n-1)(alpha + beta N/n) + (n-1) gamma N/n",
     "Patarasuk & Yuan 2009", ring_all_reduce, least_possible},
    {Collective::kAllReduce, "halving_doubling",
     "2 ceil(lg n) alpha (up to 4 for n no power of two) + 2(n-1)/n beta N + (n-1)/n gamma N",
     "Rabenseifner 2004; Traeff 2024", halving_doubling_all_reduce, least_possible},
    {Collective::kAllReduce, "tree",
     "4(lg n + k-1)(alpha + beta N/2k) + lg n gamma N, k pieces a tree",
     "Sanders, Speck & Traeff 2009", tree_all_reduce, tree_sends},
    {Collective::kAllReduce, "one_shot", "(n-1)(alpha + beta N + gamma N)",
     "FasterTransformer; vLLM custom_all_reduce 2023", one_shot_all_reduce, everything_to_all},
    {Collective::kAllReduce, "two_shot", "2(n-1)(alpha + beta N/n) + (n-1) gamma N/n",
     "FasterTransformer; MSCCL++ 2023", two_shot_all_reduce, least_possible},
    {Collective::kAllReduce, "reduce_broadcast",
     "2 ceil(lg n)(alpha + beta N) + ceil(lg n) gamma N", "Thakur, Rabenseifner & Gropp 2005",
     reduce_broadcast_all_reduce, reduce_broadcast_sends},
    {Collective::kAllReduce, "all_to_all", "(n-1)(alpha + beta N + gamma N)",
     "Thakur, Rabenseifner & Gropp 2005", all_to_all_all_reduce, everything_to_all},
    {Collective::kAllReduce, "ring_naive", "2(n-1)(alpha + beta N) + (n-1) gamma N",
     "Patarasuk & Yuan 2009", ring_naive_all_reduce, ring_naive_sends},
    {Collective::kAllReduce, "star", "2(n-1)(alpha + beta N) + (n-1) gamma N", "Li et al. 2014",
     star_all_reduce, star_sends},
    {Collective::kBroadcast, "binomial", "ceil(lg n)(alpha + beta N)",
     "Thakur, Rabenseifner & Gropp 2005", binomial_broadcast, binomial_sends},
    {Collective::kBroadcast, "star", "(n-1)(alpha + beta N)", "Li et al. 2014", star_broadcast,
     star_broadcast_sends},
};

}  // namespace

std::span<const AlgorithmInfo> algorithms() { return kAlgorithms; }

const AlgorithmInfo& find_algorithm(Collective collective, std::string_view name) {
  std::string known;
  for (const AlgorithmInfo& row : kAlgorithms) {
    if (row.collective != collective) continue;
    if (row.name == name) return row;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw UsageError(std::string(info(collective).name) + " has no algorithm called '" +
                   std::string(name) + "': expected one of " + known);
}

}  // namespace pycoll
