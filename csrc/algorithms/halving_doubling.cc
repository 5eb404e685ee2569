// Halving and doubling: reduce-scatter by recursive halving, all-gather by recursive doubling.
//
// Cost: 2 ceil(lg n) alpha + 2(n-1)/n beta N + (n-1)/n gamma N; where n is not a power of two, up
// to twice the alphas, as a range that wraps around is two messages. Each rank sends 2(n-1)/n of
// the message, for every n: for medium messages. Source: n a power of two: R. Rabenseifner,
// "Optimization of collective reduction operations", ICCS 2004. Other n: J. L. Traeff, "Optimal,
// non-pipelined reduce-scatter and allreduce algorithms", arXiv:2410.14234 (2024).
#include <bit>
#include <vector>

#include "algorithms/registry.h"

namespace pycoll {
namespace {

/// Partners differ in one bit, so both hold the same contiguous chunks; each gives the other
/// the half that the other keeps.
void add_butterfly(ScheduleBuilder& builder, int n) {
  const int num_rounds = std::bit_width(static_cast<unsigned>(n)) - 1;
  for (int round = 0; round < num_rounds; ++round) {
    const int distance = n >> (round + 1);
    for (int rank = 0; rank < n; ++rank) {
      const int partner = rank ^ distance;
      const int partners_half = partner & ~(distance - 1);
      const int own_half = rank & ~(distance - 1);
      builder.reduce(round, {partners_half, distance}, rank, partner);
      builder.copy(2 * num_rounds - 1 - round, {own_half, distance}, rank, partner);
    }
  }
}

/// Chunks [first, first + count) modulo n: one range, or two when they wrap around.
std::vector<ChunkRange> wrapped(int first, int count, int n) {
  first %= n;
  if (first + count <= n) return {{first, count}};
  return {{first, n - first}, {0, first + count - n}};
}

/// Each rank halves the number of chunks it still collects, counted upwards from its own, by
/// giving the upper half to the rank that they begin with. The all-gather goes the way back.
void add_circulant(ScheduleBuilder& builder, int n) {
  std::vector<int> skips = {n};  // n, ceil(n/2), ceil(n/4), ..., 1
  while (skips.back() > 1) skips.push_back((skips.back() + 1) / 2);
  const int num_rounds = static_cast<int>(skips.size()) - 1;
  for (int round = 0; round < num_rounds; ++round) {
    const int kept = skips[round + 1];
    const int given = skips[round] - kept;
    for (int rank = 0; rank < n; ++rank) {
      const int to = (rank + kept) % n;
      for (const ChunkRange& chunks : wrapped(to, given, n)) {
        builder.reduce(round, chunks, rank, to);
        builder.copy(2 * num_rounds - 1 - round, chunks, to, rank);
      }
    }
  }
}

}  // namespace

Schedule halving_doubling_all_reduce(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllReduce, "halving_doubling", num_ranks,
                          /*num_chunks=*/num_ranks, root);
  if (std::has_single_bit(static_cast<unsigned>(num_ranks))) {
    add_butterfly(builder, num_ranks);
  } else {
    add_circulant(builder, num_ranks);
  }
  return builder.build();
}

}  // namespace pycoll
