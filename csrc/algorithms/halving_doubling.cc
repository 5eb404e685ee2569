// Halving and doubling: reduce-scatter by recursive halving, all-gather by recursive doubling.
//
// Cost: reduce_scatter ceil(lg n) alpha + (n-1)/n (beta + gamma) N, all_gather the same without
// gamma, all_reduce the sum of both; where n is not a power of two, up to twice the alphas, as a
// range that wraps around is two messages. Each rank sends (n-1)/n of the message in each half, the
// minimum, for every n, which suits medium messages. Source: n a power of two: R. Rabenseifner,
// "Optimization of collective reduction operations", ICCS 2004. Other n: J. L. Traeff, "Optimal,
// non-pipelined reduce-scatter and allreduce algorithms", arXiv:2410.14234 (2024).
#include <bit>
#include <vector>

#include "algorithms/binomial.h"
#include "algorithms/halving.h"
#include "algorithms/table/registry.h"

namespace pycoll {
namespace {

/// Calls visit(round, chunks, giver, taker) for every message of a reduce-scatter.
template <typename Visit>
void for_each_halving(int n, Visit visit) {
  const int num_rounds = num_halving_rounds(n);
  if (std::has_single_bit(static_cast<unsigned>(n))) {
    // Partners differ in one bit, so both hold the same contiguous chunks; each gives the other one
    // the half that this one keeps.
    for (int round = 0; round < num_rounds; ++round) {
      const int distance = n >> (round + 1);
      for (int rank = 0; rank < n; ++rank) {
        const int partner = rank ^ distance;
        visit(round, ChunkRange{partner & ~(distance - 1), distance}, rank, partner);
      }
    }
    return;
  }
  // Each rank still collects a run of chunks, counted upwards from its own. In each round it halves
  // their number by giving the upper half to the rank of that half's first chunk.
  int collected = n;  // n, ceil(n/2), ceil(n/4), ..., 1
  for (int round = 0; round < num_rounds; ++round) {
    const int kept = (collected + 1) / 2;
    for (int rank = 0; rank < n; ++rank) {
      const int to = (rank + kept) % n;
      for (const ChunkRange& chunks : wrapped(to, collected - kept, n)) {
        visit(round, chunks, rank, to);
      }
    }
    collected = kept;
  }
}

}  // namespace

int num_halving_rounds(int num_ranks) { return num_binomial_rounds(num_ranks); }

void add_halving(ScheduleBuilder& builder, int n, int first_round, int root) {
  for_each_halving(n, [&](int round, ChunkRange chunks, int giver, int taker) {
    builder.reduce(first_round + round, chunks, (root + giver) % n, (root + taker) % n);
  });
}

void add_doubling(ScheduleBuilder& builder, int n, int first_round) {
  const int last_round = first_round + num_halving_rounds(n) - 1;
  // On the way back, each rank that took chunks to reduce them returns them complete.
  for_each_halving(n, [&](int round, ChunkRange chunks, int giver, int taker) {
    builder.copy(last_round - round, chunks, taker, giver);
  });
}

Schedule halving_doubling_all_reduce(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllReduce, "halving_doubling", n, /*num_chunks=*/n, root);
  add_halving(builder, n, /*first_round=*/0);
  add_doubling(builder, n, num_halving_rounds(n));
  return builder.build();
}

Schedule halving_reduce_scatter(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kReduceScatter, "halving", n, /*num_chunks=*/n, root);
  add_halving(builder, n, /*first_round=*/0);
  return builder.build();
}

Schedule recursive_doubling_all_gather(int num_ranks, int root) {
  const int n = num_ranks;
  ScheduleBuilder builder(Collective::kAllGather, "recursive_doubling", n, /*num_chunks=*/n, root);
  add_doubling(builder, n, /*first_round=*/0);
  return builder.build();
}

}  // namespace pycoll
