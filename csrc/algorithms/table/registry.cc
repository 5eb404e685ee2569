#include "algorithms/table/registry.h"

#include <string>

#include "algorithms/table/sent.h"
#include "base/error.h"

namespace pycoll {
namespace {

constexpr AlgorithmInfo kAlgorithms[] = {
    {Collective::kAllReduce, "ring", "2(n-1)(alpha + beta N/n) + (n-1) gamma N/n",
     "Patarasuk & Yuan 2009", ring_all_reduce, sent::least_for_all_reduce},
    {Collective::kAllReduce, "halving_doubling",
     "2 ceil(lg n) alpha (up to 4 for n no power of two) + 2(n-1)/n beta N + (n-1)/n gamma N",
     "Rabenseifner 2004; Traeff 2024", halving_doubling_all_reduce, sent::least_for_all_reduce},
    {Collective::kAllReduce, "tree",
     "4(lg n + k-1)(alpha + beta N/2k) + lg n gamma N, k pieces a tree",
     "Sanders, Speck & Traeff 2009", tree_all_reduce, sent::tree},
    {Collective::kAllReduce, "one_shot", "(n-1)(alpha + beta N + gamma N)",
     "FasterTransformer; vLLM custom_all_reduce 2023", one_shot_all_reduce,
     sent::everything_to_all},
    {Collective::kAllReduce, "two_shot", "2(n-1)(alpha + beta N/n) + (n-1) gamma N/n",
     "FasterTransformer; MSCCL++ 2023", two_shot_all_reduce, sent::least_for_all_reduce},
    {Collective::kAllReduce, "reduce_broadcast",
     "2 ceil(lg n)(alpha + beta N) + ceil(lg n) gamma N", "Thakur, Rabenseifner & Gropp 2005",
     reduce_broadcast_all_reduce, sent::reduce_broadcast},
    {Collective::kAllReduce, "all_to_all", "(n-1)(alpha + beta N + gamma N)",
     "Thakur, Rabenseifner & Gropp 2005", all_to_all_all_reduce, sent::everything_to_all},
    {Collective::kAllReduce, "ring_naive", "2(n-1)(alpha + beta N) + (n-1) gamma N",
     "Patarasuk & Yuan 2009", ring_naive_all_reduce, sent::ring_naive},
    {Collective::kAllReduce, "star", "2(n-1)(alpha + beta N) + (n-1) gamma N", "Li et al. 2014",
     star_all_reduce, sent::star_all_reduce},
    {Collective::kReduceScatter, "ring", "(n-1)(alpha + beta N/n + gamma N/n)",
     "Patarasuk & Yuan 2009", ring_reduce_scatter, sent::others_blocks},
    {Collective::kReduceScatter, "halving",
     "ceil(lg n) alpha (up to 2 for n no power of two) + (n-1)/n (beta + gamma) N",
     "Rabenseifner 2004; Traeff 2024", halving_reduce_scatter, sent::others_blocks},
    {Collective::kReduceScatter, "all_pairs", "(n-1)(alpha + beta N/n + gamma N/n)", "MSCCL++ 2023",
     all_pairs_reduce_scatter, sent::others_blocks},
    {Collective::kAllGather, "ring", "(n-1)(alpha + beta N/n)", "Patarasuk & Yuan 2009",
     ring_all_gather, sent::others_blocks},
    {Collective::kAllGather, "recursive_doubling",
     "ceil(lg n) alpha (up to 2 for n no power of two) + (n-1)/n beta N",
     "Thakur, Rabenseifner & Gropp 2005; Traeff 2024", recursive_doubling_all_gather,
     sent::others_blocks},
    {Collective::kAllGather, "bruck",
     "ceil(lg n) alpha (up to 2 for ranges that wrap) + (n-1)/n beta N", "Bruck et al. 1997",
     bruck_all_gather, sent::others_blocks},
    {Collective::kAllGather, "all_pairs", "(n-1)(alpha + beta N/n)", "MSCCL++ 2023",
     all_pairs_all_gather, sent::others_blocks},
    {Collective::kBroadcast, "binomial", "ceil(lg n)(alpha + beta N)",
     "Thakur, Rabenseifner & Gropp 2005", binomial_broadcast, sent::binomial_broadcast},
    {Collective::kBroadcast, "star", "(n-1)(alpha + beta N)", "Li et al. 2014", star_broadcast,
     sent::star_broadcast},
    {Collective::kBroadcast, "scatter_all_gather", "(ceil(lg n) + n-1) alpha + 2(n-1)/n beta N",
     "Barnett et al. 1994", scatter_all_gather_broadcast, sent::scatter_all_gather},
    {Collective::kBroadcast, "chain", "(n-1)(alpha + beta N), pipelined by tiles",
     "Pjesivac-Grbovic et al. 2007", chain_broadcast, sent::chain_broadcast},
    {Collective::kReduce, "binomial", "ceil(lg n)(alpha + beta N + gamma N)",
     "Thakur, Rabenseifner & Gropp 2005", binomial_reduce, sent::one_to_root},
    {Collective::kReduce, "star", "(n-1)(alpha + beta N + gamma N)", "Li et al. 2014", star_reduce,
     sent::one_to_root},
    {Collective::kReduce, "chain", "(n-1)(alpha + beta N + gamma N), pipelined by tiles",
     "Pjesivac-Grbovic et al. 2007", chain_reduce, sent::one_to_root},
    {Collective::kReduce, "two_shot", "2(n-1)(alpha + beta N/n) + (n-1) gamma N/n", "MSCCL++ 2023",
     two_shot_reduce, sent::two_shot_reduce},
    {Collective::kReduce, "reduce_scatter_gather",
     "2 ceil(lg n) alpha (up to 3 for n no power of two) + (n-1)/n (2 beta + gamma) N",
     "Rabenseifner 2004; Traeff 2024", reduce_scatter_gather_reduce, sent::reduce_scatter_gather},
    {Collective::kGather, "binomial", "ceil(lg n) alpha + (n-1)/n beta N",
     "Thakur, Rabenseifner & Gropp 2005", binomial_gather, sent::binomial_gather},
    {Collective::kGather, "star", "(n-1)(alpha + beta N/n)", "Li et al. 2014", star_gather,
     sent::block_to_root},
    {Collective::kScatter, "binomial", "ceil(lg n) alpha + (n-1)/n beta N",
     "Thakur, Rabenseifner & Gropp 2005", binomial_scatter, sent::binomial_scatter},
    {Collective::kScatter, "star", "(n-1)(alpha + beta N/n)", "Li et al. 2014", star_scatter,
     sent::star_scatter},
    {Collective::kAllToAll, "pairwise", "(n-1)(alpha + beta N/n)",
     "Thakur, Rabenseifner & Gropp 2005", pairwise_all_to_all, sent::others_blocks},
    {Collective::kAllToAll, "all_pairs", "(n-1)(alpha + beta N/n)", "MSCCL++ 2023",
     all_pairs_all_to_all, sent::others_blocks},
    {Collective::kAllToAll, "bruck", "(n-1) alpha + lg n beta N/2 over 2 ceil(lg n) links a rank",
     "Bruck et al. 1997", bruck_all_to_all, sent::bruck_all_to_all},
    {Collective::kScan, "chain", "(n-1)(alpha + beta N + gamma N), pipelined by tiles",
     "Pjesivac-Grbovic et al. 2007", chain_scan, sent::chain_scan},
    {Collective::kScan, "recursive_doubling", "ceil(lg n)(alpha + beta N + gamma N)",
     "Hillis & Steele 1986", recursive_doubling_scan, sent::doubling_scan},
    {Collective::kScan, "all_pairs", "(n-1)(alpha + beta N + gamma N)", "folklore", all_pairs_scan,
     sent::all_pairs_scan},
    {Collective::kExscan, "chain", "(n-1)(alpha + beta N) + (n-2) gamma N, pipelined by tiles",
     "Pjesivac-Grbovic et al. 2007", chain_exscan, sent::chain_exscan},
    {Collective::kExscan, "recursive_doubling",
     "(ceil(lg (n-1)) + 1)(alpha + beta N) + ceil(lg (n-1)) gamma N", "Hillis & Steele 1986",
     recursive_doubling_exscan, sent::doubling_exscan},
    {Collective::kExscan, "all_pairs", "(n-1)(alpha + beta N) + (n-2) gamma N", "folklore",
     all_pairs_exscan, sent::all_pairs_exscan},
    {Collective::kNeighborExchange, "direct", "2 alpha + beta N", "MPI 3.0 2012",
     direct_neighbor_exchange, sent::both_sides},
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
