// Inputs and exact results of ranks, for every collective, dtype and op, from the core's tables.
//
// A block repeats kPeriod elements, small integers that depend on rank, block and place. Small
// integers add up exactly in every dtype and order, so results are compared bit by bit; and since
// results repeat as their inputs do, the reference is computed for one period only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reduce/dtypes.h"
#include "reduce/ops.h"
#include "schedule/collectives.h"

namespace pycoll::perf {

class Pattern {
 public:
  static constexpr int64_t kPeriod = 509;  // a prime: a shifted block cannot look right

  /// Raises UsageError where the op does not go with the dtype.
  Pattern(const CollectiveInfo& collective, DType dtype, Op op, int root, int num_ranks);

  /// Fills what `rank` brings: all blocks of its input, each of `count` elements.
  void fill_input(int rank, void* input, int64_t count) const;
  /// Elements of its output that are not what they must be.
  int64_t count_wrong(int rank, const void* output, int64_t count) const;

 private:
  using Bytes = std::vector<std::byte>;

  Bytes brought(int rank, int block) const;
  Bytes reduced(int num_ranks, int block) const;

  const CollectiveInfo& collective_;
  DType dtype_;
  Op op_;
  int root_;
  int num_ranks_;
  std::vector<Bytes> values_;  // the elements 0, 1, 2, 3 of this dtype
};

/// Blocks of a rank's input and output buffer.
int num_input_blocks(const CollectiveInfo& collective, int rank, int num_ranks, int root);
int num_output_blocks(const CollectiveInfo& collective, int rank, int num_ranks, int root);

}  // namespace pycoll::perf
