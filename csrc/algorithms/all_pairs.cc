// All pairs: every rank sends directly to every rank that needs its data, in one round.
//
// Cost: reduce_scatter (n-1)(alpha + beta N/n + gamma N/n), where each owner reduces its block from
// all in one step. all_gather (n-1)(alpha + beta N/n), or one slot that all others read.
// all_to_all (n-1)(alpha + beta N/n). scan (n-1)(alpha + beta N + gamma N); exscan the same with
// one gamma N less, as every rank first takes its neighbour's value. Every reduction is one step in
// rank order, so these algorithms round once and give identical results on all ranks. Source: the
// "all-pairs" kernels of MSCCL++ (2023); for scan, folklore.
#include "algorithms/table/registry.h"

namespace pycoll {
namespace {

template <typename Visit>
void for_each_pair(int num_ranks, Visit visit) {
  for (int src = 0; src < num_ranks; ++src) {
    for (int dst = 0; dst < num_ranks; ++dst) {
      if (src != dst) visit(src, dst);
    }
  }
}

}  // namespace

Schedule all_pairs_reduce_scatter(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kReduceScatter, "all_pairs", num_ranks,
                          /*num_chunks=*/num_ranks, root);
  for_each_pair(num_ranks, [&](int src, int dst) { builder.reduce(0, {dst}, src, dst); });
  return builder.build();
}

Schedule all_pairs_all_gather(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllGather, "all_pairs", num_ranks,
                          /*num_chunks=*/num_ranks, root);
  for_each_pair(num_ranks, [&](int src, int dst) { builder.copy(0, {src}, src, dst); });
  return builder.build();
}

Schedule all_pairs_all_to_all(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kAllToAll, "all_pairs", num_ranks,
                          /*num_chunks=*/num_ranks * num_ranks, root);
  for_each_pair(num_ranks,
                [&](int src, int dst) { builder.copy(0, {src * num_ranks + dst}, src, dst); });
  return builder.build();
}

Schedule all_pairs_scan(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kScan, "all_pairs", num_ranks, /*num_chunks=*/1, root);
  for_each_pair(num_ranks, [&](int src, int dst) {
    if (src < dst) builder.reduce(0, {0}, src, dst);
  });
  return builder.build();
}

Schedule all_pairs_exscan(int num_ranks, int root) {
  ScheduleBuilder builder(Collective::kExscan, "all_pairs", num_ranks, /*num_chunks=*/1, root);
  // From round 1 on, rank r holds rank r - 1's value in place of its own.
  for (int rank = 0; rank + 1 < num_ranks; ++rank) builder.copy(0, {0}, rank, rank + 1);
  for_each_pair(num_ranks, [&](int src, int dst) {
    if (0 < src && src < dst) builder.reduce(1, {0}, src, dst);
  });
  return builder.build();
}

}  // namespace pycoll
