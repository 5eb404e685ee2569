// Scan by recursive doubling: in round k, each rank sends its partial result to the rank 2^k
// higher.
//
// Cost: scan ceil(lg n)(alpha + beta N + gamma N); exscan one message more, as every rank first
// takes its neighbour's value. After round k, rank r has reduced ranks r - 2^(k+1) + 1 to r, so one
// value per rank is enough. This suits small messages and many ranks.
// Source: W. D. Hillis, G. L. Steele, "Data parallel algorithms", CACM 29 (1986).
#include "algorithms/table/registry.h"

namespace pycoll {
namespace {

/// Leaves every rank from `first_rank` on with the reduction of `first_rank` to that rank.
void add_doubling(ScheduleBuilder& builder, int n, int first_rank, int first_round) {
  int round = first_round;
  for (int distance = 1; first_rank + distance < n; distance *= 2, ++round) {
    for (int rank = first_rank; rank + distance < n; ++rank) {
      builder.reduce(round, {0}, rank, rank + distance);
    }
  }
}

}  // namespace

Schedule recursive_doubling_scan(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kScan, "recursive_doubling", num_ranks, /*num_chunks=*/1,
                          root);
  add_doubling(builder, num_ranks, /*first_rank=*/0, /*first_round=*/0);
  return builder.build();
}

Schedule recursive_doubling_exscan(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kExscan, "recursive_doubling", num_ranks, /*num_chunks=*/1,
                          root);
  for (int rank = 0; rank + 1 < num_ranks; ++rank) builder.copy(0, {0}, rank, rank + 1);
  // Rank r has rank r - 1's value now; rank 0 has no valid value.
  add_doubling(builder, num_ranks, /*first_rank=*/1, /*first_round=*/1);
  return builder.build();
}

}  // namespace pycoll
