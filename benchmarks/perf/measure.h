// One row: a message of one size, out of place and in place, timed and checked.
#pragma once

#include <optional>

#include "comm/communicator.h"
#include "perf/options.h"
#include "perf/pattern.h"

namespace pycoll::perf {

/// Seconds of one call by the slowest rank, over all blocks of calls.
struct Figures {
  double median_s = 0;
  double min_s = 0;
  double p99_s = 0;
  int64_t num_calls = 0;             // in all
  std::optional<int64_t> num_wrong;  // on all ranks; nothing: not checked
};

/// One size of one dtype and op.
struct RowPlan {
  const CollectiveInfo& collective;
  DType dtype;
  Op op;
  int64_t count;  // elements of a block

  int64_t block_bytes() const { return count * static_cast<int64_t>(dtype_size(dtype)); }
  int64_t payload_bytes(int num_ranks) const {
    return block_bytes() * collective.blocks_per_payload(num_ranks);
  }
};

/// Collective. Nothing where the collective has no such form: in place, the smaller one of input
/// and output lies where its blocks are in the larger one.
std::optional<Figures> measure(Communicator& comm, const Options& options, const RowPlan& plan,
                               bool in_place);

}  // namespace pycoll::perf
