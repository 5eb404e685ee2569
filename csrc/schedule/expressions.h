// Reduction expressions, each stored once: equal expressions have equal numbers, and give equal
// bits.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace pycoll {

/// The grouping of a reduction. One step combines its sources from left to right in a wide
/// accumulator and rounds once, when it stores.
enum class Order : uint8_t {
  kFlat,      // one step combines the start values of ranks 0, 1, 2, ...
  kLeftFold,  // ((r0 + r1) + r2) + ...: the same operations in the same order, in several steps
  kOther,
};

/// Number of an expression.
using Value = int32_t;
inline constexpr Value kUndefined = -1;

class Expressions {
 public:
  Expressions(int num_ranks, int num_chunks)
      : num_ranks_(num_ranks),
        num_chunks_(num_chunks),
        num_words_((static_cast<size_t>(num_ranks) + 63) / 64) {}

  /// The start value of `rank` for `chunk`.
  Value start(int rank, int chunk) const { return rank * num_chunks_ + chunk; }

  /// The combination of `operands` in their order; nothing when two of them contain the same rank's
  /// start value. With `final`, the operator's last factor is applied to the result.
  std::optional<Value> combine(const std::vector<Value>& operands, bool final);

  bool is_final(Value value) const { return !is_start(value) && node(value).final; }
  Order order(Value value) const;

  /// The lowest of ranks 0..count-1 whose start value is not in `value`; -1: all are in it.
  int first_missing(Value value, int count) const;
  /// The lowest rank from `count` on whose start value is in `value`; -1: there is none.
  int first_beyond(Value value, int count) const;

 private:
  struct Node {
    bool final;       // the op's last factor is applied
    int num_in_fold;  // m: this is a left fold of ranks 0..m-1; 0: it is no left fold
    bool flat;        // the left fold is a single step
  };

  bool is_start(Value value) const { return value < num_ranks_ * num_chunks_; }
  size_t index(Value value) const { return static_cast<size_t>(value - num_ranks_ * num_chunks_); }
  const Node& node(Value value) const { return nodes_[index(value)]; }
  int start_rank(Value value) const { return value / num_chunks_; }
  bool has_contributed(Value value, int rank) const;
  int num_in_fold(Value value) const;
  Node describe(const std::vector<Value>& operands, bool final) const;

  const int num_ranks_;
  const int num_chunks_;
  const size_t num_words_;  // of a set of ranks
  std::vector<Node> nodes_;
  std::vector<uint64_t> contributors_;  // a set of ranks for each node, in num_words_ words
  std::map<std::vector<int32_t>, Value> ids_;
};

}  // namespace pycoll
