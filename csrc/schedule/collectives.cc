#include "schedule/collectives.h"

#include <string>

#include "base/error.h"

namespace pycoll {
namespace {

bool everywhere(const ChunkAt&) { return true; }
bool at_root(const ChunkAt& at) { return at.rank == at.root; }
Goal reduced_everywhere(const ChunkAt&) { return Goal::kReduced; }
Goal roots_everywhere(const ChunkAt&) { return Goal::kRoots; }

// In the order of the enumerators.
constexpr CollectiveInfo kCollectives[] = {
    {Collective::kAllReduce, "all_reduce", /*has_op=*/true, /*has_root=*/false, everywhere,
     reduced_everywhere, [](int n) { return 2.0 * (n - 1) / n; }},
    {Collective::kBroadcast, "broadcast", /*has_op=*/false, /*has_root=*/true, at_root,
     roots_everywhere, [](int) { return 1.0; }},
    // Nobody leaves before all have come. It runs as the all-reduce of a byte that nobody looks at.
    {Collective::kBarrier, "barrier", /*has_op=*/false, /*has_root=*/false, everywhere,
     reduced_everywhere, [](int) { return 0.0; }},
};

}  // namespace

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
