#include "schedule/collectives.h"

#include <string>

#include "base/error.h"

namespace pycoll {
namespace {

using Kind = Goal::Kind;

bool everywhere(const BlockAt&) { return true; }
bool at_root(const BlockAt& at) { return at.rank == at.root; }
bool at_owner(const BlockAt& at) { return at.rank == at.block; }

int first_block(const BlockAt&) { return 0; }
int same_block(const BlockAt& at) { return at.block; }
int own_block(const BlockAt& at) { return at_owner(at) ? 0 : kNoBlock; }
int first_block_at_root(const BlockAt& at) { return at_root(at) ? 0 : kNoBlock; }
int same_block_at_root(const BlockAt& at) { return at_root(at) ? at.block : kNoBlock; }

Goal reduced_everywhere(const BlockAt&) { return {Kind::kReduced}; }
Goal reduced_at_root(const BlockAt& at) { return {at_root(at) ? Kind::kReduced : Kind::kAny}; }
Goal reduced_at_owner(const BlockAt& at) { return {at_owner(at) ? Kind::kReduced : Kind::kAny}; }
Goal roots_everywhere(const BlockAt& at) { return {Kind::kStart, at.root}; }
Goal owners_everywhere(const BlockAt& at) { return {Kind::kStart, at.block}; }
Goal owners_at_root(const BlockAt& at) {
  return at_root(at) ? Goal{Kind::kStart, at.block} : Goal{};
}
Goal roots_at_owner(const BlockAt& at) {
  return at_owner(at) ? Goal{Kind::kStart, at.root} : Goal{};
}
Goal prefix(const BlockAt&) { return {Kind::kPrefix}; }
Goal prefix_before(const BlockAt& at) { return {at.rank == 0 ? Kind::kAny : Kind::kPrefixBefore}; }

// all_to_all: block s * n + d goes from rank s to rank d.
int pair_src(const BlockAt& at) { return at.block / at.num_ranks; }
int pair_dst(const BlockAt& at) { return at.block % at.num_ranks; }
bool at_pair_src(const BlockAt& at) { return at.rank == pair_src(at); }
Goal from_pair_src(const BlockAt& at) {
  return at.rank == pair_dst(at) ? Goal{Kind::kStart, pair_src(at)} : Goal{};
}
int pair_input(const BlockAt& at) { return at_pair_src(at) ? pair_dst(at) : kNoBlock; }
int pair_output(const BlockAt& at) { return at.rank == pair_dst(at) ? pair_src(at) : kNoBlock; }

// neighbor_exchange: block 2s goes to the left neighbour of rank s, block 2s + 1 to the right one.
int side_src(const BlockAt& at) { return at.block / 2; }
int side_dst(const BlockAt& at) {
  const int step = at.block % 2 == 0 ? at.num_ranks - 1 : 1;
  return (side_src(at) + step) % at.num_ranks;
}
bool at_side_src(const BlockAt& at) { return at.rank == side_src(at); }
Goal from_side_src(const BlockAt& at) {
  return at.rank == side_dst(at) ? Goal{Kind::kStart, side_src(at)} : Goal{};
}
int side_input(const BlockAt& at) { return at_side_src(at) ? at.block % 2 : kNoBlock; }
// The output starts with the block from the left neighbour.
int side_output(const BlockAt& at) { return at.rank == side_dst(at) ? 1 - at.block % 2 : kNoBlock; }

int one(int) { return 1; }
int two(int) { return 2; }
int as_many_as_ranks(int n) { return n; }

double all_of_it(int) { return 1.0; }
double others_share(int n) { return static_cast<double>(n - 1) / n; }
double twice_others_share(int n) { return 2 * others_share(n); }
double nothing(int) { return 0.0; }

// In the order of the enumerators.
constexpr CollectiveInfo kCollectives[] = {
    {Collective::kAllReduce, "all_reduce", /*has_op=*/true, /*has_root=*/false, Blocks::kOne,
     everywhere, reduced_everywhere, first_block, first_block, one, twice_others_share},
    {Collective::kBroadcast, "broadcast", /*has_op=*/false, /*has_root=*/true, Blocks::kOne,
     at_root, roots_everywhere, first_block_at_root, first_block, one, all_of_it},
    // No rank leaves before all have entered. Runs as the all-reduce of a byte that is not used.
    {Collective::kBarrier, "barrier", /*has_op=*/false, /*has_root=*/false, Blocks::kOne,
     everywhere, reduced_everywhere, first_block, first_block, one, nothing},
    {Collective::kReduceScatter, "reduce_scatter", /*has_op=*/true, /*has_root=*/false,
     Blocks::kPerRank, everywhere, reduced_at_owner, same_block, own_block, as_many_as_ranks,
     others_share},
    {Collective::kAllGather, "all_gather", /*has_op=*/false, /*has_root=*/false, Blocks::kPerRank,
     at_owner, owners_everywhere, own_block, same_block, as_many_as_ranks, others_share},
    {Collective::kReduce, "reduce", /*has_op=*/true, /*has_root=*/true, Blocks::kOne, everywhere,
     reduced_at_root, first_block, first_block_at_root, one, all_of_it},
    {Collective::kGather, "gather", /*has_op=*/false, /*has_root=*/true, Blocks::kPerRank, at_owner,
     owners_at_root, own_block, same_block_at_root, as_many_as_ranks, others_share},
    {Collective::kScatter, "scatter", /*has_op=*/false, /*has_root=*/true, Blocks::kPerRank,
     at_root, roots_at_owner, same_block_at_root, own_block, as_many_as_ranks, others_share},
    {Collective::kAllToAll, "all_to_all", /*has_op=*/false, /*has_root=*/false, Blocks::kPerPair,
     at_pair_src, from_pair_src, pair_input, pair_output, as_many_as_ranks, others_share},
    {Collective::kScan, "scan", /*has_op=*/true, /*has_root=*/false, Blocks::kOne, everywhere,
     prefix, first_block, first_block, one, all_of_it},
    {Collective::kExscan, "exscan", /*has_op=*/true, /*has_root=*/false, Blocks::kOne, everywhere,
     prefix_before, first_block, first_block, one, all_of_it},
    {Collective::kNeighborExchange, "neighbor_exchange", /*has_op=*/false, /*has_root=*/false,
     Blocks::kTwoPerRank, at_side_src, from_side_src, side_input, side_output, two, all_of_it},
};
static_assert(std::size(kCollectives) == kNumCollectives);

}  // namespace

int num_blocks(Blocks blocks, int num_ranks) {
  switch (blocks) {
    case Blocks::kPerRank:
      return num_ranks;
    case Blocks::kPerPair:
      return num_ranks * num_ranks;
    case Blocks::kTwoPerRank:
      return 2 * num_ranks;
    default:
      return 1;
  }
}

std::span<const CollectiveInfo> collectives() { return kCollectives; }

const CollectiveInfo& info(Collective collective) {
  return kCollectives[static_cast<size_t>(collective)];
}

Collective collective_from_name(std::string_view name) {
  std::string known;
  for (const CollectiveInfo& row : kCollectives) {
    if (row.name == name) return row.id;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw UsageError("no collective is called '" + std::string(name) + "': expected one of " + known);
}

}  // namespace pycoll
